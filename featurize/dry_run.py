"""What `python -m featurize` would do with a run: told without loading weights and without writing a file.

Conversations are rendered as extraction renders them, so the sizes are counted, not guessed.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from featurize.config import DataConfig, FeaturizeConfig, SpoolConfig
from featurize.contract import dtype_name
from featurize.encoding import require_encoding
from featurize.shards import Widths, check_space, cut_units, is_finished
from featurize.spool import Spool, documents_held_out
from featurize.store import require_inputs
from featurize.teacher import Drafted
from featurize.tokenised import TokenisedSet, describe_inputs, load, load_renderer, tokenise
from featurize.vllm_extract import purpose
from models.artefact import fingerprint
from models.config import DraftConfig, EngineConfig, TargetConfig
from models.errors import Refused
from models.servers import command, own_environment, show
from models.target import Target, aux_layers, describe_target

PORT = 8000
"""In the place of the port that is found when the server starts."""


def documents_of(
    directory: Path,
    data: DataConfig,
    settings: FeaturizeConfig,
    model: TargetConfig,
    target: Target,
    draft: DraftConfig,
) -> TokenisedSet:
    """The run's documents: those in its folder if extraction was there, else rendered now and kept nowhere.

    Raises:
        Refused: the folder was made of other inputs, no document is left, or the target's logits are not supported.
    """
    top_k = Drafted.inputs(settings.teacher_k, target, draft, data.validation_share)
    if not (directory / "tokenised.json").is_file():
        return tokenise(data, load_renderer(target, model), "")
    inputs = describe_inputs(data, settings, target, aux_layers(target, model.aux_layers), top_k)
    require_inputs(directory, inputs)
    found = load(directory)
    if found is not None and found.fingerprint == fingerprint(inputs):
        return found
    return tokenise(data, load_renderer(target, model), fingerprint(inputs))


def tell(
    run: Path,
    data: DataConfig,
    settings: FeaturizeConfig,
    spool: SpoolConfig,
    model: TargetConfig,
    engine: EngineConfig,
    draft: DraftConfig,
) -> None:
    """Print target, planes, sizes against free space, and the server's command if there is one.

    Args:
        run: the run's folder.

    Raises:
        Refused: what extraction would refuse before it loads anything, too little space among it.
    """
    target = describe_target(model, weights=False)
    layers = aux_layers(target, model.aux_layers)
    require_encoding(settings.encoding, target.hidden_size)
    streaming = spool.gigabytes is not None
    directory = Path(spool.directory) if streaming else run / "features"
    print(
        f"target: {model.path}, {target.num_layers} layers, hidden size {target.hidden_size:,}, vocabulary "
        f"{target.vocab_size:,}, {dtype_name(target.dtype)}; aux planes {', '.join(map(str, layers))}"
    )
    tokenised = documents_of(directory, data, settings, model, target, draft)
    kept_k, everywhere, drafted = settings.teacher_k, settings.final_everywhere, None
    if kept_k is not None:
        drafted = Drafted.of(tokenised, kept_k, target, draft, data.validation_share)
        print(f"teachers: {kept_k} likeliest of {len(drafted.ids_D):,} draft tokens, {drafted.bytes} bytes a position")
    else:
        print(f"teachers: the final plane, {'at every position' if everywhere else 'where a row learns from it'}")
    supervised = sum(end - start for document in tokenised.documents for start, end in document.spans)
    print(f"data: {len(tokenised.tokens):,} tokens, {supervised / len(tokenised.tokens):.0%} of them in spans")
    units = cut_units(tokenised, settings.shard_tokens, everywhere)
    widths = Widths(target.hidden_size, len(layers), settings.encoding, None if drafted is None else drafted.bytes)
    if streaming:
        kept = tokenised.part(documents_held_out(tokenised.documents, data.validation_share), "")
        Spool(directory, spool, units, widths).check_space(cut_units(kept, settings.shard_tokens, everywhere))
    else:
        check_space(directory, tokenised, units, [u for u in units if not is_finished(directory, u)], widths)
    if settings.backend == "transformers":
        print(f"backend: transformers on {settings.device}, batches of {settings.batch_tokens:,} tokens")
    elif settings.url is not None:
        print(f"backend: the vLLM server at {settings.url}, {settings.in_flight} documents in flight")
    else:
        if engine.kind != "vllm":
            raise Refused(f"featurize.backend=vllm needs engine=vllm (engine.kind is {engine.kind}) or featurize.url")
        words = purpose([*layers, target.num_layers], Path("PLANES"), settings.batch_tokens, target.trust_remote_code)
        print(f"backend: {show(command(engine, target.path, PORT, words), own_environment(engine))}")
    others = f"{shlex.quote(str(directory))}; run it several times at once and the processes share the shards"
    print(f"writes: {others}")
