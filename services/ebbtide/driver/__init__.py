"""The episode driver: runs a run's environments, submits their turns as rollouts, and completes their episodes.

It keeps nothing of its own: every id and every body that it submits is a function of the run's spec, its seed, and the
order in which versions were announced. A driver that starts again submits the same once more and is told what became
of it.
"""
