"""Models of ours -> forms that others read."""

from transduce.export.formats import FORMATS, export
from transduce.export.onnx import check_model

__all__ = ["FORMATS", "check_model", "export"]
