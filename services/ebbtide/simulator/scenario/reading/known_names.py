"""Says which profiles and policies there are, so that names of others are refused."""

from msgspec import Struct


class KnownNames(Struct, frozen=True, kw_only=True):
    """Names that come with the simulator. None: any name passes, for those who know better later."""

    engines: frozenset[str] | None = None
    trainers: frozenset[str] | None = None
    costs: frozenset[str] | None = None
    policies: dict[str, type[Struct]] | None = None  # and the parameters of each
