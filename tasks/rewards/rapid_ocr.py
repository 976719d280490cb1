# SPDX-License-Identifier: Apache-2.0
"""RapidOCR under both of its names: the older package refuses Python 3.13, and both wheels hold the same models."""

import sys
from typing import Protocol

import numpy as np


class RapidOcr(Protocol):
    """The same three models (PP-OCRv4's detector and recogniser, and a classifier of turned lines), run alike.

    The classifier is never asked: text that stands on its head is not what was wanted.
    """

    package: str
    module: str

    def __init__(self, threads: int, rec_image_shape: tuple[int, int, int]):
        """With so many threads; the recogniser's input is (channels, height, least width in pixels)."""

    def read_line(self, picture: np.ndarray) -> str:
        """What stands in the picture, [h, w, 3] in OpenCV's order, taken for one line."""

    def find(self, picture: np.ndarray) -> list[str]:
        """The lines that are found in the picture, [h, w, 3] in OpenCV's order, from the top."""


class RapidOcrOnnxruntime:
    """rapidocr-onnxruntime 1.4.4, for Python before 3.13."""

    package, module = "rapidocr-onnxruntime", "rapidocr_onnxruntime"

    def __init__(self, threads: int, rec_image_shape: tuple[int, int, int]):
        from rapidocr_onnxruntime import RapidOCR

        self.ocr = RapidOCR(intra_op_num_threads=threads, inter_op_num_threads=1, rec_img_shape=list(rec_image_shape))

    def read_line(self, picture: np.ndarray) -> str:
        """The picture's text, [h, w, 3]; see `RapidOcr`."""
        lines, _ = self.ocr.text_rec(picture)
        return lines[0][0]

    def find(self, picture: np.ndarray) -> list[str]:
        """The picture's lines, [h, w, 3]; see `RapidOcr`."""
        lines, _ = self.ocr(picture, use_cls=False)
        return [text for _, text, _ in lines or []]


class RapidOcr3:
    """rapidocr 3.4.5, its successor. Later wheels hold other models, or ask the network for these under other names."""

    package = module = "rapidocr"

    def __init__(self, threads: int, rec_image_shape: tuple[int, int, int]):
        from rapidocr import RapidOCR

        self.ocr = RapidOCR(
            params={
                "Global.log_level": "error",  # that nothing was found is a warning of its own for each picture
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Rec.rec_img_shape": list(rec_image_shape),
            }
        )

    def read_line(self, picture: np.ndarray) -> str:
        """The picture's text, [h, w, 3]; see `RapidOcr`."""
        from rapidocr.ch_ppocr_rec import TextRecInput

        return self.ocr.text_rec(TextRecInput(img=picture)).txts[0]

    def find(self, picture: np.ndarray) -> list[str]:
        """The picture's lines, [h, w, 3]; see `RapidOcr`."""
        return list(self.ocr(picture, use_cls=False).txts or ())


READER: type[RapidOcr] = RapidOcr3 if sys.version_info >= (3, 13) else RapidOcrOnnxruntime
"""The one that pyproject.toml asks for with this Python."""
