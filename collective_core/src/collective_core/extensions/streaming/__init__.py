"""Training on streams: records from files that grow, a directory, standard input and Kafka, and evaluation while they come.

Neutral to the framework; ``hvd.data`` of the frameworks' interfaces. docs/streaming.md.
"""

from __future__ import annotations

from collective_core.extensions.streaming.evaluation import ProgressiveValidation, auc
from collective_core.extensions.streaming.files import Directory, Files, StandardInput
from collective_core.extensions.streaming.kafka import Kafka
from collective_core.extensions.streaming.source import Position, Positions, Read, Source
from collective_core.extensions.streaming.stream import Batch, Stream

__all__ = [
    "Batch",
    "Directory",
    "Files",
    "Kafka",
    "Position",
    "Positions",
    "ProgressiveValidation",
    "Read",
    "Source",
    "StandardInput",
    "Stream",
    "auc",
]
