"""Every architecture family transformers has a config class for, and the model classes it may be built as.

A family is a folder of `transformers.models`. Its members are the config types defined there; those that have a
model class of their own come with their heads, most telling first."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "CAUSAL_LM",
         "CTC", "ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION",
         "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "IMAGE_TO_IMAGE", "MASKED_IMAGE_MODELING",
         "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "TIME_SERIES_PREDICTION",
         "VISUAL_QUESTION_ANSWERING", "OBJECT_DETECTION", "PRETRAINING", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM",
         "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "ZERO_SHOT_OBJECT_DETECTION", "AUDIO_XVECTOR",
         "AUDIO_FRAME_CLASSIFICATION", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING")
"""Kinds of model, in the order in which they are tried; the bare model comes last."""


@dataclass(frozen=True)
class Candidate:
    """One way to build a member of a family."""

    model_type: str
    head: str
    class_name: str


def families() -> dict[str, tuple[str, ...]]:
    """Family -> its config types, the one named like the family first, then the shortest names."""
    found: dict[str, list[str]] = defaultdict(list)
    for model_type in transformers.CONFIG_MAPPING:
        module = transformers.CONFIG_MAPPING[model_type].__module__.split(".")
        if "models" in module:
            found[module[module.index("models") + 1]].append(model_type)
    return {family: tuple(sorted(types, key=lambda t: (t.replace("-", "_") != family, len(t), t)))
            for family, types in sorted(found.items())}


def candidates(types: tuple[str, ...]) -> tuple[Candidate, ...]:
    """All (config type, head) pairs of a family that have a model class, in the order to try them."""
    tables = head_tables()
    return tuple(Candidate(t, head, name) for t in types for head, table in tables
                 if (name := class_of(table.get(t))) is not None)


def head_tables() -> list[tuple[str, dict[str, Any]]]:
    """(head, {config type: class name}), the preferred heads first, the bare model last."""
    prefix, suffix = "MODEL_FOR_", "_MAPPING_NAMES"
    heads = [n[len(prefix):-len(suffix)] for n in dir(modeling_auto) if n.startswith(prefix) and n.endswith(suffix)]
    order = [h for h in HEADS if h in heads] + sorted(set(heads) - set(HEADS))
    return [(h.lower(), dict(getattr(modeling_auto, prefix + h + suffix))) for h in order] + [
        ("model", dict(modeling_auto.MODEL_MAPPING_NAMES))]


def class_of(entry: Any) -> str | None:
    """The first class that this transformers really has."""
    names = (entry,) if isinstance(entry, str) else entry or ()
    return next((n for n in names if hasattr(transformers, n)), None)
