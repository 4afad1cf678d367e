"""MTP heads in a real vLLM: over any dense target (route A), and the EAGLE-3 layout without fc (route B).

Of the families with a module of their own the CPU build serves none that could be tried here: Qwen3-Next and Qwen3.5
need kernels for linear attention (Triton), DeepSeek-V3 latent attention, GLM-4-MoE its fused experts. MiMo's own
target class hands its module the state before the final norm (vLLM alone does), so its module is tried over Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.test_heads import check_served

pytestmark = pytest.mark.engine

ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "route A, a module of MiMo's over Llama": ({"algorithm": "mtp"}, "mtp"),
    "route B, no fc, draft vocabulary": ({"use_aux_hidden_state": False, "vocab_size": 200}, "eagle3"),
}


@pytest.mark.parametrize(("draft", "method"), ROUTES.values(), ids=ROUTES.keys())
def test_an_overfitted_head_that_reads_the_final_plane_is_accepted_as_by_the_reference_decoder(
    make_target: Callable[..., Path], tiny_prompts: Path, tmp_path: Path, draft: dict[str, Any], method: str
) -> None:
    summary = check_served(make_target, tiny_prompts, tmp_path, None, draft)
    assert {cell["method"] for cell in summary["served"]["cells"]} == {"none", method}
    assert f'"method":"{method}"' in summary["served"]["commands"][method]
