"""Simulates one seed for `ebbtide simulate`, which starts this program."""

from ebbtide.simulator.parallel.seed_program import serve_seed
from ebbtide.simulator.parallel.task_scenario import simulate_task

if __name__ == "__main__":
    serve_seed(simulate_task)
