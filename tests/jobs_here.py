"""The jobs of an advice or a search in this process, not in worker processes."""

from polysite import config, study
from polysite.errors import Paused, RunError


class JobsHere:
    """Does the work of workers; remembers the jobs that it began, and is interrupted after ``limit`` of them."""

    def __init__(self, limit=1000):
        self.limit, self.began = limit, []

    def __call__(self, jobs, parallel, step):
        finished, failed = [job for job in jobs if job.done], {}
        for job in (job for job in jobs if not job.done):
            if len(self.began) >= self.limit:
                raise KeyboardInterrupt
            self.began.append(job)
            before = job.first(finished)
            chosen, options = config.load(job.file), {"evaluate": False, "until": job.until}
            try:
                if job.run.exists():
                    study.resume(job.run, **options)
                else:
                    study.train(chosen, job.run, after=before and before.run, **options)
                finished.append(job)
            except Paused:
                pass
            except RunError as problem:
                failed[job.title] = str(problem)
        return failed
