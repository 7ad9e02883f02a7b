"""How hospitals differ, measured before anything is trained; and which strategy that speaks for."""
