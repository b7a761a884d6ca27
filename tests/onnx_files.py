"""Small ONNX files around given tensors, written with the onnx package, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from oazoo.formats.detect import open_source
from oazoo.formats.onnx import OnnxSource


def model_of(*tensors: TensorProto, nodes: Any = ()) -> onnx.ModelProto:
    """A model that holds ``tensors``."""
    return helper.make_model(helper.make_graph(list(nodes), "g", [], [], list(tensors)))


def write(path: Path, *tensors: TensorProto, nodes: Any = ()) -> Path:
    path.write_bytes(model_of(*tensors, nodes=nodes).SerializeToString())
    return path


def proto(name: str, data_type: int, dims: list[int], **fields: Any) -> TensorProto:
    """A tensor with its values in the named fields."""
    tensor = TensorProto(name=name, data_type=data_type, dims=dims)
    for field, values in fields.items():
        if field == "raw_data":
            tensor.raw_data = values
        else:
            getattr(tensor, field).extend(values)
    return tensor


def read(path: Path, name: str = "t") -> np.ndarray[Any, Any]:
    with open_source(path) as source:
        assert isinstance(source, OnnxSource)
        tensor = source[name]
        values = np.array(tensor.numpy())
        assert tensor.raw().nbytes == tensor.info.nbytes == values.nbytes
        chunked = list(tensor.chunks(2))
        assert np.array_equal(np.concatenate(chunked) if chunked else values.reshape(-1), values.reshape(-1))
        return values
