"""Seeds from a YAML file, with the line of each for messages."""
from __future__ import annotations

from autoshard.errors import SeedError, UsageError
from autoshard.seeds.grammar import Seed, seed_text


def load_seeds(path: str) -> dict[str, Seed]:
    """Seeds from a YAML file: a mapping from keys to values, a value being text (`tp,-`) or a list of axes per dim.

    Raises UsageError, naming file and line."""
    import yaml

    try:
        with open(path) as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
            if root is None:
                return {}
            if not isinstance(root, yaml.MappingNode):
                raise UsageError(f"{path} is no mapping of seeds; write lines such as: layers.*.wq.weight: tp,-")
            loader = yaml.SafeLoader("")
            pairs = [(k, loader.construct_object(v, deep=True)) for k, v in root.value]
    except OSError as e:
        raise UsageError(f"cannot read seeds {path}: {e.strerror or e}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # such as the date 2026-13-45
        raise UsageError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
    seeds: dict[str, Seed] = {}
    for key, value in pairs:
        where = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key.value, str):
            raise UsageError(f"{where}: the name of a seed must be text, such as layers.*.wq.weight")
        if key.value in seeds:
            raise UsageError(f"seed {key.value!r} is given twice, at {seeds[key.value].where} and {where}; keep one of them")
        try:
            seeds[key.value] = Seed(seed_text(value), where)
        except SeedError as e:
            raise SeedError(f"{where}: {e}") from None
    return seeds
