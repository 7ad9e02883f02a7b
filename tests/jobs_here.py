"""The jobs of an advice or a search in this process, not in worker processes."""

from polysite import study
from polysite.errors import Paused, RunError


class JobsHere:
    """Does the work of workers; remembers the jobs that it began, and is interrupted after ``limit`` of them."""

    def __init__(self, limit=1000):
        self.limit, self.began, self.said = limit, [], []
        self.failing = set()  # seeds

    def step(self, note, done=1):
        self.said.append(note)

    def train(self, jobs):
        finished, failed = [job for job in jobs if job.done], {}
        for job in (job for job in jobs if not job.done):
            if len(self.began) >= self.limit:
                raise KeyboardInterrupt
            self.began.append(job)
            if job.seed in self.failing:
                failed[job.title] = "no memory"
                continue
            before = job.first(finished)
            options = {"evaluate": job.evaluate, "until": job.until}
            try:
                if job.run.exists():
                    study.resume(job.run, **options)
                else:
                    study.train(job.study, job.run, after=before and before.run, **options)
                finished.append(job)
            except Paused:
                pass
            except RunError as problem:
                failed[job.title] = str(problem)
        return failed
