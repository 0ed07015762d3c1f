"""No guard at all, as a program: the rollout engine always has its whole budget, and four fifths of the memory."""

from benchmarks.pair.rivals.rival_program import run_rival
from benchmarks.pair.virtual.serving_policies import ConstantBudget, ConstantMemory

if __name__ == "__main__":
    run_rival(ConstantBudget, ConstantMemory, __doc__ or "")
