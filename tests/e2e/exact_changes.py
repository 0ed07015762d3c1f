"""What differs between two checkpoints, as a worker hands it to its engine."""

from pathlib import Path


def write_changes(first: Path, second: Path, path: Path) -> Path:
    """Write per tensor the positions that differ and the values of the `second` checkpoint there."""
    import torch
    from safetensors.torch import load_file, save_file

    before, after = (load_file(checkpoint / "model.safetensors") for checkpoint in (first, second))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in after.items():
        indices = (tensor != before[name]).flatten().nonzero().flatten()
        found |= {f"{name}.indices": indices, f"{name}.values": tensor.flatten()[indices]}
    save_file(found, path)
    return path
