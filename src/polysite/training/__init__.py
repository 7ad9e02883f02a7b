"""Training in torch: the site, tasks, losses, patches and prediction."""
