# SPDX-License-Identifier: Apache-2.0
"""What a GPU can compute at most, by the name that `torch.cuda.get_device_name` gives it.

Matrix products without sparsity, in 1e12 operations a second. Sources: NVIDIA's data sheets of H100, H200, A100, HGX
B200, L40S and L4 (where they give bf16 with sparsity, half of it), and the whitepapers of Ada Lovelace for the RTX 4090
(bf16 with fp32 accumulation) and of Ampere GA102 for the RTX A6000. fp32 is without TF32, as torch multiplies unless it
is told otherwise.
"""

BFLOAT16, FLOAT32 = "bfloat16", "float32"


def _peaks(bfloat16: float, float32: float | None) -> dict[str, float]:
    return {BFLOAT16: bfloat16} | ({} if float32 is None else {FLOAT32: float32})


PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA H200": _peaks(989.4, 66.9),
    "NVIDIA H200 NVL": _peaks(835.5, 60.0),
    "NVIDIA H100 80GB HBM3": _peaks(989.4, 66.9),
    "NVIDIA H100 PCIe": _peaks(756.5, 51.2),
    "NVIDIA H100 NVL": _peaks(835.5, 60.0),
    "NVIDIA B200": _peaks(2250.0, None),
    "NVIDIA A100-SXM4-40GB": _peaks(312.0, 19.5),
    "NVIDIA A100-SXM4-80GB": _peaks(312.0, 19.5),
    "NVIDIA A100-PCIE-40GB": _peaks(312.0, 19.5),
    "NVIDIA A100 80GB PCIe": _peaks(312.0, 19.5),
    "NVIDIA L40S": _peaks(362.05, 91.6),
    "NVIDIA L4": _peaks(121.0, 30.3),
    "NVIDIA RTX A6000": _peaks(154.8, 38.7),
    "NVIDIA GeForce RTX 4090": _peaks(165.2, 82.6),
}


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """The highest TFLOP/s of one device in that number format; None where the table does not know it."""
    return PEAK_TFLOPS.get(device_name, {}).get(dtype)
