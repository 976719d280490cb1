"""Is a float8 product right on this GPU, and how fast is it beside bf16's? SD3.5-medium's shapes, 32 pictures."""
import torch
from triton.testing import do_bench

from models.runtime.float8 import Float8Linear, _scaled, rounded

torch.manual_seed(0)
for rows, inner, columns in ((32768, 1536, 1536), (32768, 1536, 4608), (32768, 1536, 6144), (32768, 6144, 1536),
                             (6560, 1536, 4608), (6560, 6144, 1536), (32768, 1536, 32), (32768, 1536, 96)):
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16) * 0.03
    bias = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    flops = 2 * rows * inner * columns
    plain = do_bench(lambda: torch.nn.functional.linear(x, w, bias), warmup=10, rep=30, return_mode="median")
    line = f"{rows:6d} x {inner} x {columns}: bf16 {plain:.3f} ms {flops / plain / 1e9:.0f} TFLOP/s"
    if columns % 128 == 0:
        (v, s), (w8, ws) = rounded(x), rounded(w)
        out = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
        out = _scaled(v, s, w8, ws, bias, torch.bfloat16)
        ref = (v[:256].double() @ w8.double().T) * s[:256] * ws.T + bias
        error = ((out[:256].double() - ref).norm() / ref.norm()).item()
        fast = do_bench(lambda: _scaled(v, s, w8, ws, bias, torch.bfloat16), warmup=10, rep=30, return_mode="median")
        slow = do_bench(lambda: torch._scaled_mm(v, w8.T, scale_a=s, scale_b=ws.T, bias=bias, out_dtype=torch.bfloat16,
                                                 use_fast_accum=False), warmup=10, rep=30, return_mode="median")
        line += (f" | float8 {fast:.3f} ms {flops / fast / 1e9:.0f} TFLOP/s, x {plain / fast:.2f}, without fast "
                 f"accumulation {slow:.3f} ms | error against fp64 of the same factors {error:.1e}")
    print(line, flush=True)
linear = torch.nn.Linear(1536, 4608, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
for gradient in (False, True):
    layer = Float8Linear(linear, gradient)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, options={"deterministic": True})
    x = torch.randn(8, 1024, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    seed = torch.randn(8, 1024, 4608, device="cuda", dtype=torch.bfloat16)
    found = [(o := f(x)), *torch.autograd.grad(o, x, seed)] if (f := compiled) else []
    plain = [(o := linear(x)), *torch.autograd.grad(o, x, seed)]
    print("compiled, gradient in float8" if gradient else "compiled, gradient in bf16",
          [f"{((a - b).float().norm() / b.float().norm()).item():.3f}" for a, b in zip(found, plain, strict=True)],
          "(expected near 0.04, and 0.03 to 0.05)", flush=True)
