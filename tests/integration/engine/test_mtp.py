"""MTP heads in a real vLLM: over any dense target (route A), and the EAGLE-3 layout without fc (route B).

Families with a module of their own are not served here yet. vLLM 0.32's CPU build is no reason, going by its sources:
it has linear attention that takes back drafts (Qwen3-Next, Qwen3.5: `_cpu_gdn_attention_spec_aware`), experts
(GLM-4-MoE: `CPUUnquantizedExperts`), and latent attention (DeepSeek-V3: `CPU_MLA`, of 512 + 64 dimensions only). What
their classes compute is written down in tests/models/mtp_targets.py. MiMo's own target class hands its module the state
before the final norm (vLLM alone does), so its module is tried over Llama.
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
