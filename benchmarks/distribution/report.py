"""What versions on their way come to: a row for each, a table for people, and the figures of the whole."""

from statistics import median, quantiles
from typing import Any, Final

from benchmarks.distribution.policy import Policy
from benchmarks.distribution.scene import Update

Row = dict[str, Any]
FULL: Final = "full copies, passed on while they come"
FROM_PEERS: Final = "full copies, from peers"
SWEEP: Final = "sweep: full copies"
PATCHES: Final = "patches"
PATCHES_FROM_PEERS: Final = "patches, from peers"
STAR: Final = "star of full copies"
#: Where a plain copy takes less, the link is no longer what limits.
_SLOW_S: Final = 4.0


def row(what: str, update: Update, policy: Policy, once: float) -> Row:
    """`once`: seconds of a plain transfer."""
    seconds = update.seconds
    return {
        "what": what,
        "workers": len(seconds),
        "one_transfer_s": once,
        "p50_s": median(seconds),
        "p99_s": quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0],
        "last_s": seconds[-1],
        "last_over_one_transfer": seconds[-1] / once,
        "stall_s": sum(update.stalls),
        "crossed": update.crossed,
        "sent": update.sent,
        "crossed_over_one_copy": update.crossed / policy.size,
    }


def table(rows: list[Row]) -> str:
    """Seconds from a version's commit at the trainer's relay, and what crossed the slow link both ways, in copies."""
    lines = [f"{'':<44}{'plain copy':>11}{'p50':>8}{'p99':>8}{'last':>8}{'/ plain':>9}{'stalls':>9}{'copies':>9}"]
    lines += [
        f"{row['what']:<44}{row['one_transfer_s']:>9.2f} s{row['p50_s']:>8.2f}{row['p99_s']:>8.2f}{row['last_s']:>8.2f}"
        f"{row['last_over_one_transfer']:>9.2f}{row['stall_s']:>9.4f}{row['crossed_over_one_copy']:>9.3f}"
        for row in rows
    ]
    return "\n".join(lines)


def told(row: Row) -> str:
    return f"{row['what']}: last of {row['workers']} after {row['last_s']:.2f} s, {row['crossed']:,} bytes crossed"


def figures(rows: list[Row]) -> Row:
    """Of several rows that a promise is about the worst: full copies through the far relay and from peers, also those
    of the sweep where the link is what limits."""

    def of(field: str, *names: str) -> list[float]:
        return [row[field] for row in rows if row["what"] in names]

    slow = [row for row in rows if row["what"] == SWEEP and row["one_transfer_s"] >= _SLOW_S]
    times = of("last_over_one_transfer", FULL, FROM_PEERS)
    return {
        "slow_link_bytes_over_one_copy": max(of("crossed_over_one_copy", FULL, FROM_PEERS, SWEEP)),
        "last_install_over_one_transfer": max([*times, *(row["last_over_one_transfer"] for row in slow)]),
        "last_install_over_one_transfer_from_peers": max(of("last_over_one_transfer", FROM_PEERS)),
        "star_over_pipelined": max(of("last_over_one_transfer", STAR)) / max(of("last_over_one_transfer", FULL)),
        "full_over_patches": min(of("last_s", FULL)) / max(of("last_s", PATCHES)),
        "full_over_patches_from_peers": min(of("last_s", FROM_PEERS)) / max(of("last_s", PATCHES_FROM_PEERS)),
        "patch_stall_s_per_worker": median(row["stall_s"] / row["workers"] for row in rows if row["what"] == PATCHES),
    }
