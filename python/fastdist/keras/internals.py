"""The private names of Keras that fastdist uses, all in one place.

Tested with Keras 3.15.1 and a nightly build of 3.16.

On instances, trainers replace `_get_metrics_result_or_logs` and `_initialize_ddp` of a model,
`next` of a SeedGenerator and `_moments` of a BatchNormalization. They read `_flatten_layers`,
`_non_trainable_variables`, `_seed_generators`, `_compile_loss._flat_losses`, `_reduction_axes`,
`_num_samples`, `_shuffle`, `_learning_rate` and `_initial_epoch`. The list of callbacks overrides
`_configure_async_dispatch`. Backups read the variables `epoch_iterator`
and `callbacks` of a running `fit` and the iterator's `_steps_seen`, and replace its methods
`_get_iterator` and `_enumerate_iterator`. For parameter servers they also call `_use_weight_decay`
of an optimizer and `_track_variables` of a model, replace its `_post_build`, and pickle the
attributes `_layers` and `_outbound_nodes` apart.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import keras
import torch
from keras.src.backend.common.global_state import get_global_attribute as get_global_attribute
from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
from keras.src.callbacks.monitor_callback import MonitorCallback as MonitorCallback
from keras.src.losses.loss import apply_mask as apply_mask
from keras.src.random.seed_generator import global_seed_generator as global_seed_generator
from keras.src.saving.keras_saveable import KerasSaveable as KerasSaveable
from keras.src.trainers import trainer as _trainers
from keras.src.trainers.data_adapters import get_data_adapter as get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import (
    train_validation_split as train_validation_split,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import (
    class_weight_to_sample_weights as class_weight_to_sample_weights,
)
from keras.src.utils import is_default as is_default
from keras.src.utils.tracking import TrackedDict as TrackedDict
from keras.src.utils.tracking import TrackedList as TrackedList

from fastdist.errors import UnsupportedError


def running_fit(model: Any) -> tuple[Any, list[Any]]:
    """Return the iterator over batches and the callbacks of the `fit` that has called us.

    Callbacks do not get them from Keras; they are local variables of its `fit`.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        found = dict(frame.f_locals)  # from Python 3.13 on a proxy, whose keys are a list
        if found.get("self") is model and {"epoch_iterator", "callbacks"} <= found.keys():
            return found["epoch_iterator"], found["callbacks"].callbacks
    raise UnsupportedError(
        f"fastdist.keras.BackupAndRestore does not know the fit of Keras {keras.__version__}; use "
        "Keras 3.15, or keras.callbacks.BackupAndRestore"
    )


def results_of_metrics(model: Any) -> Callable[[], dict[str, Any]]:
    """Return the method that computes the results of a model's metrics from their variables alone.

    From 3.16 on, Keras' `get_metrics_result` first sums them over torch's process group.
    """
    base = getattr(_trainers, "BaseTrainer", None) or _trainers.Trainer  # before 3.16
    usual = keras.Model.get_metrics_result
    method = type(model).get_metrics_result
    if method is usual:
        method = base.get_metrics_result
    elif usual is not base.get_metrics_result and torch.distributed.is_initialized():
        raise UnsupportedError(
            f"{type(model).__name__} overrides get_metrics_result, and Keras {keras.__version__} "
            "sums metrics over torch's process group, which a strategy does too; train without "
            "init_process_group, or without the override"
        )

    def results() -> dict[str, Any]:
        # Copies: the result of some metrics, such as Sum, is the variable itself, or its tensor.
        own = {
            name: value.value if isinstance(value, keras.Variable) else value
            for name, value in method(model).items()
        }
        return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in own.items()}

    return results
