# SPDX-License-Identifier: Apache-2.0
"""RapidOCR under both of its names: the older package refuses Python 3.13, and both wheels hold the same models."""

import sys
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from tasks.rewards.errors import RewardError

CUDA = "CUDAExecutionProvider"
CUDA_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"}
"""Of onnxruntime. Kernels are chosen by no stopwatch, and factors are not rounded to 10 bits: as near to a CPU's
reading as may be."""
DetLimitType = Literal["max", "min"]
"""Of which side the detector's input has a limit, in PaddleOCR's words: see `RapidOcr`."""
LINES_A_PASS = {"cpu": 1, "cuda": 64}
"""Of pictures that are each taken for a line: on a CPU batches are slower than single pictures. On a GPU a pass of
another number of them than the last one's takes a second, as each convolution is planned anew."""


class RapidOcr(Protocol):
    """The same three models (PP-OCRv4's detector and recogniser, and a classifier of turned lines), run alike.

    The classifier is never asked: text that stands on its head is not what was wanted.
    """

    package: str
    module: str

    def __init__(self, threads: int, rec_image_shape: tuple[int, int, int], det_limit_type: DetLimitType):
        """With so many threads; the recogniser's input is (channels, height, least width in pixels).

        The detector looks at a picture as it is, but for one whose longer side has more than 2,000 pixels ("max"), or
        at one that is enlarged until its shorter side has 736 ("min").
        """

    def keep_buffers(self) -> None:
        """Let the detector keep its buffers from one picture to the next; before `use_gpu`.

        RapidOCR has them given back to the system, whose new pages take a quarter of the detector's time.
        """

    def use_gpu(self) -> None:
        """Compute on the process's first GPU from now on. Raises RewardError where onnxruntime has none."""

    def read_lines(self, pictures: Sequence[np.ndarray]) -> list[str]:
        """What stands in each picture, [h, w, 3] in OpenCV's order and all of one size, taken for one line.

        `LINES_A_PASS` at a time, never fewer. `find`, for which a reader is not used besides, passes lines six by six.
        """

    def find(self, picture: np.ndarray) -> list[str]:
        """The lines that are found in the picture, [h, w, 3] in OpenCV's order, from the top."""


class RapidOcrOnnxruntime:
    """rapidocr-onnxruntime 1.4.4, for Python before 3.13."""

    package, module = "rapidocr-onnxruntime", "rapidocr_onnxruntime"

    def __init__(self, threads: int, rec_image_shape: tuple[int, int, int], det_limit_type: DetLimitType):
        from rapidocr_onnxruntime import RapidOCR

        self.ocr = RapidOCR(
            intra_op_num_threads=threads,
            inter_op_num_threads=1,
            rec_img_shape=list(rec_image_shape),
            det_limit_type=det_limit_type,
        )
        self.lines_a_pass = LINES_A_PASS["cpu"]

    def keep_buffers(self) -> None:
        """See `RapidOcr`."""
        self.ocr.text_det.infer.session = with_kept_buffers(self.ocr.text_det.infer.session)

    def use_gpu(self) -> None:
        """See `RapidOcr`."""
        compute_on_gpu(self.ocr.text_det.infer.session, self.ocr.text_rec.session.session)
        self.lines_a_pass = LINES_A_PASS["cuda"]

    def read_lines(self, pictures: Sequence[np.ndarray]) -> list[str]:
        """The pictures' texts, each [h, w, 3]; see `RapidOcr`."""
        self.ocr.text_rec.rec_batch_num = self.lines_a_pass
        lines, _ = self.ocr.text_rec(full_passes(pictures, self.lines_a_pass))
        return [text for text, *_ in lines[: len(pictures)]]

    def find(self, picture: np.ndarray) -> list[str]:
        """The picture's lines, [h, w, 3]; see `RapidOcr`."""
        lines, _ = self.ocr(picture, use_cls=False)
        return [text for _, text, _ in lines or []]


class RapidOcr3:
    """rapidocr 3.4.5, its successor. Later wheels hold other models, or ask the network for these under other names."""

    package = module = "rapidocr"

    def __init__(self, threads: int, rec_image_shape: tuple[int, int, int], det_limit_type: DetLimitType):
        from rapidocr import RapidOCR

        self.ocr = RapidOCR(
            params={
                "Global.log_level": "error",  # that nothing was found is a warning of its own for each picture
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Rec.rec_img_shape": list(rec_image_shape),
                "Det.limit_type": det_limit_type,
            }
        )
        self.lines_a_pass = LINES_A_PASS["cpu"]

    def keep_buffers(self) -> None:
        """See `RapidOcr`."""
        self.ocr.text_det.session.session = with_kept_buffers(self.ocr.text_det.session.session)

    def use_gpu(self) -> None:
        """See `RapidOcr`."""
        compute_on_gpu(self.ocr.text_det.session.session, self.ocr.text_rec.session.session)
        self.lines_a_pass = LINES_A_PASS["cuda"]

    def read_lines(self, pictures: Sequence[np.ndarray]) -> list[str]:
        """The pictures' texts, each [h, w, 3]; see `RapidOcr`."""
        from rapidocr.ch_ppocr_rec import TextRecInput

        self.ocr.text_rec.rec_batch_num = self.lines_a_pass
        passes = full_passes(pictures, self.lines_a_pass)
        return list(self.ocr.text_rec(TextRecInput(img=passes)).txts[: len(pictures)])

    def find(self, picture: np.ndarray) -> list[str]:
        """The picture's lines, [h, w, 3]; see `RapidOcr`."""
        return list(self.ocr(picture, use_cls=False).txts or ())


def full_passes(pictures: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """The pictures, [h, w, 3] each, and the last one again until they fill passes of `size`."""
    return [*pictures, *list(pictures[-1:]) * (-len(pictures) % size)]


def with_kept_buffers(session: Any) -> Any:
    """The same network in a session of onnxruntime that keeps its buffers from one picture to the next."""
    from onnxruntime import InferenceSession

    options = session.get_session_options()
    options.enable_cpu_mem_arena = True
    return InferenceSession(session._model_path, options, session.get_providers())


def compute_on_gpu(*sessions: Any) -> None:
    """Move sessions of onnxruntime to the process's first GPU.

    Raises:
        RewardError: onnxruntime is one for CPUs, finds no GPU, or not CUDA's libraries: it would go on on the CPU.
    """
    import torch  # whose libraries of CUDA are onnxruntime's, too  # noqa: F401

    for session in sessions:
        session.set_providers([CUDA, "CPUExecutionProvider"], [CUDA_OPTIONS, {}])
        if session.get_providers()[0] != CUDA:
            raise RewardError(
                "ocr: device is cuda, but onnxruntime found no GPU to compute on here (it has "
                f"{', '.join(session.get_providers())}): install onnxruntime-gpu for this version of CUDA in place of "
                "onnxruntime, and give the reward a GPU by its placement or num_gpus"
            )


READER: type[RapidOcr] = RapidOcr3 if sys.version_info >= (3, 13) else RapidOcrOnnxruntime
"""The one that pyproject.toml asks for with this Python."""
