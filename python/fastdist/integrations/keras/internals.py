"""The private names of Keras that fastdist uses, all in one place. Tested with Keras 3.15.1.

On instances, trainers replace `_get_metrics_result_or_logs` of a model, `next` of a SeedGenerator
and `_moments` of a BatchNormalization. They read `_flatten_layers`, `_non_trainable_variables`,
`_seed_generators`, `_compile_loss._flat_losses`, `_reduction_axes`, `_num_samples`,
`_learning_rate` and `_initial_epoch`.
"""

from __future__ import annotations

from keras.src.backend import get_keras_mask
from keras.src.losses.loss import apply_mask
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import (
    class_weight_to_sample_weights,
    unpack_x_y_sample_weight,
)
from keras.src.utils import is_default

__all__ = [
    "ArrayDataAdapter",
    "DataAdapter",
    "apply_mask",
    "class_weight_to_sample_weights",
    "get_data_adapter",
    "get_keras_mask",
    "is_default",
    "train_validation_split",
    "unpack_x_y_sample_weight",
]
