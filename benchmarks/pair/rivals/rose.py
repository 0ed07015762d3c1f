"""Runs ROSE's co-serving policy as it is reported: `benchmarks.pair.rivals.rose_policy` says what it is.

What the reports do not state is named by `EBBTIDE_ROSE`, as `STEP_S,WATERMARK,HEADROOM,HELD`.
"""

import os
from functools import partial
from typing import Final

from benchmarks.pair.rivals.rival_program import run_rival
from benchmarks.pair.rivals.rose_policy import RoseAdmission, RoseMemory, RoseSetting, RoseTables

#: That_prf (of a prompt, and of each of its tokens) and That_dec (of one request, and of each further one) of the
#: served model, as probed before the benchmark: seconds.
TABLES: Final = "EBBTIDE_ROSE_TABLES"
SETTING: Final = "EBBTIDE_ROSE"


def main() -> None:
    setting = RoseSetting.parse(os.environ[SETTING])
    prefill_s, token_s, decode_s, more_s = map(float, os.environ[TABLES].split(","))
    tables = RoseTables(prefill_s=prefill_s, prefill_token_s=token_s, decode_s=decode_s, decode_more_s=more_s)
    run_rival(partial(RoseAdmission, setting=setting, tables=tables), partial(RoseMemory, setting), __doc__ or "")


if __name__ == "__main__":
    main()
