"""Holds the tables of all files that a scenario names, by the file's name there."""

from msgspec import Struct

from ebbtide.simulator.scenario.inputs.grant_tape import GrantTape
from ebbtide.simulator.scenario.inputs.known_turns import KnownTurns
from ebbtide.simulator.scenario.inputs.price_table import PriceTable
from ebbtide.simulator.scenario.inputs.quantile_table import QuantileTable
from ebbtide.simulator.scenario.inputs.spot_trace import SpotTrace


class InputTables(Struct, frozen=True, kw_only=True):
    spots: dict[str, SpotTrace] = {}
    quantiles: dict[str, QuantileTable] = {}
    prices: dict[str, PriceTable] = {}
    grants: dict[str, GrantTape] = {}
    known: dict[str, KnownTurns] = {}  # by run: it was recorded, and nothing of its work is drawn
