"""A cluster whose jobs share a queue, played in virtual time."""

from __future__ import annotations

import math

from elasticdl.master.rules.sharing import Sharing
from elasticdl.master.state.claim import Claim

START_SECONDS = 6.0  # from a worker's place to its first step


class PlayedCluster:
    """Places for pods, which get them in the order of the jobs, or by ``chance``, a generator of random numbers."""

    def __init__(self, places, jobs, look=3.0, chance=None):
        self.places, self.look, self.chance = places, look, chance
        self.jobs = jobs  # name: (arrival, work, gains)
        self.left = {name: work for name, (_, work, _) in jobs.items()}
        self.pods = {name: [] for name in jobs}  # since when each has a place, or None
        self.sharing = {name: Sharing() for name in jobs}
        self.claims, self.done, self.moves = {}, {}, 0
        self.waits = {}  # name: places, and since when it waits with these
        self.fewest = {}  # workers, where it is not one
        self.unfit = set()  # jobs that can take no place
        self.now = 0.0

    def tick(self, seconds):
        alive = [name for name, (arrival, _, _) in self.jobs.items() if arrival <= self.now and name not in self.done]
        for number, name in enumerate(alive):
            if math.floor((self.now + number * 0.7) / self.look) != math.floor(
                (self.now - seconds + number * 0.7) / self.look
            ):
                self.act(name)
        self.place([name for name in alive if name not in self.unfit])
        for name in alive:
            ready = sum(placed is not None and placed + START_SECONDS <= self.now for placed in self.pods[name])
            if ready >= self.fewest.get(name, 1):
                self.left[name] -= seconds * sum(self.jobs[name][2][:ready])
            if self.left[name] <= 0:
                self.done[name] = self.now
                self.pods[name] = []
                del self.claims[name]
        self.now += seconds

    def place(self, names):
        free = self.places - sum(self.held(name) for name in self.pods)
        waiting = [(name, number) for name in names for number, placed in enumerate(self.pods[name]) if placed is None]
        if self.chance:
            self.chance.shuffle(waiting)
        for name, number in waiting[: max(0, free)]:
            self.pods[name][number] = self.now

    def resize(self, places):
        """Nodes come, or are lost with what is on them."""
        there = [name for name in self.pods for placed in self.pods[name] if placed is not None]
        for name in self.chance.sample(there, max(0, len(there) - places)):
            self.pods[name].remove(next(placed for placed in self.pods[name] if placed is not None))
        self.places = places

    def act(self, name):
        pods, fewest = self.pods[name], self.fewest.get(name, 1)
        held = self.held(name)
        before, since = self.waits.get(name, (None, 0.0))
        self.waits[name] = held, since if held == before and held < len(pods) else self.now
        waited = self.now - self.waits[name][1]
        own = Claim(name, held, len(pods) - held, fewest, 8, self.left[name], self.jobs[name][2], waited)
        self.claims[name] = own
        self.sharing[name].see(own, list(self.claims.values()), self.now)
        most, _ = self.sharing[name].bound(8, fewest, "")
        self.moves += most != len(pods)
        pods.sort(key=lambda placed: (placed is None, placed or 0))
        del pods[most:]
        pods += [None] * (most - len(pods))

    def held(self, name):
        return sum(placed is not None for placed in self.pods[name])
