"""Passes on what a device around another one does not change: which engines are there, and what they need."""

from ebbtide.trainer.device_loan import TrainingDevice


class EnclosedDevice:
    """Half of a `TrainingDevice`: what the inner one says of its engines. Classes that derive from it lend and take
    back.
    """

    def __init__(self, device: TrainingDevice) -> None:
        self._device = device

    def engines(self) -> frozenset[str]:
        return self._device.engines()

    def engine_bytes(self) -> int:
        return self._device.engine_bytes()
