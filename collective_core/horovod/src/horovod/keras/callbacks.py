"""Callbacks of ``model.fit``."""

from collective_core.keras.callbacks import BestModelCheckpoint as BestModelCheckpoint
from collective_core.keras.callbacks import BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback
from collective_core.keras.callbacks import LearningRateScheduleCallback as LearningRateScheduleCallback
from collective_core.keras.callbacks import LearningRateWarmupCallback as LearningRateWarmupCallback
from collective_core.keras.callbacks import MetricAverageCallback as MetricAverageCallback
