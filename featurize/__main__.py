"""`python -m featurize experiment=demo`: conversations -> token ids and spans -> hidden states in a feature store.

Run again, it goes on where it stopped; with everything there it returns at once, without loading the model. Run many
times at once, on any machines that see the folder, the processes share the units; each returns when all are done.

With `spool.gigabytes` hidden states do not stay: it runs beside `python -m train`, which takes and removes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conf import Run, stage
from featurize.backends import checked_backend
from featurize.claims import EXTRACTING, Claims
from featurize.contract import FeatureContract, dtype_name, require_planes
from featurize.dry_run import tell
from featurize.encoding import require_encoding
from featurize.extract import choose_device, extract, extract_unit
from featurize.shards import Widths, check_space, cut_units, is_finished, remove_leftovers
from featurize.spool import Spool, fill, kept_part, publish
from featurize.store import bind, is_complete, require_inputs, write_manifest
from featurize.teacher import Drafted
from featurize.tokenised import TokenisedSet, describe_inputs, load_or_tokenise
from models.errors import Refused
from models.target import aux_layers, describe_target


def check_wanted(run: Run) -> None:
    """Raise Refused where a run has another's features, or its head could not be trained on its own."""
    if run.features_of is not None:
        raise Refused(f"features_of={run.features_of} names the run whose features these are; extract them as that run")
    require_planes(run.draft, run.featurize)


def work(run: Run) -> bool:
    """Make the run's features, or make them as training asks for them; False when there is nothing to make."""
    check_wanted(run)
    streaming = run.spool.gigabytes is not None
    directory = Path(run.spool.directory) if streaming else run.directory / "features"
    target = describe_target(run.target)
    layers = aux_layers(target, run.target.aux_layers)
    encoding, everywhere, kept_k = run.featurize.encoding, run.featurize.final_everywhere, run.featurize.teacher_k
    require_encoding(encoding, target.hidden_size)
    share, drafts = run.data.validation_share, run.draft
    inputs = describe_inputs(run.data, run.featurize, target, layers, Drafted.inputs(kept_k, target, drafts, share))
    claims = Claims(directory)
    if streaming:
        claims.attend(EXTRACTING)
    with claims.common():
        require_inputs(directory, inputs)
        if not streaming and is_complete(directory, inputs):
            return False
        if run.featurize.backend == "transformers":  # before a long wait; of a server's accelerator nothing is taken
            choose_device(run.featurize.device)
        tokenised = load_or_tokenise(directory, run.data, target, run.target, inputs)
    units = cut_units(tokenised, run.featurize.shard_tokens, everywhere)
    drafted = None if kept_k is None else Drafted.of(tokenised, kept_k, target, drafts, share)
    widths = Widths(target.hidden_size, len(layers), encoding, None if drafted is None else drafted.bytes)
    if streaming:
        spool = Spool(directory, run.spool, units, widths)
        if spool.finished():
            return False
        kept, kept_inputs = kept_part(tokenised, inputs, share)
        spool.check_space(cut_units(kept, run.featurize.shard_tokens, everywhere))
    else:
        check_space(directory, tokenised, units, [u for u in units if not is_finished(directory, u)], widths)

    opened = checked_backend(target, layers, tokenised, run.featurize, run.target, run.engine, run.directory)
    with opened as (backend, canary):
        with claims.common():
            bind(directory, inputs, tokenised)
            if drafted is not None:
                drafted.save(directory)
        # A server takes all of its accelerator: what it says is worked on there only if the device is named.
        device = backend.device if run.featurize.device == "auto" else choose_device(run.featurize.device)
        teaching = None if drafted is None else drafted.teaching(target, device)
        batch_tokens, hidden = run.featurize.batch_tokens, target.hidden_size
        contract = FeatureContract(
            target_config=target.config_hash,
            target_weights=target.weights_hash,
            hidden_size=hidden,
            vocab_size=target.vocab_size,
            dtype=dtype_name(target.dtype),
            aux_layers=layers,
            encoding=encoding,
            final="post_norm",
            tokenizer=inputs["target tokenizer and chat template"],
            backend=backend.name,
            backend_version=backend.version,
            quantization=backend.quantization,
            final_everywhere=everywhere,
            **(drafted.facts() if drafted is not None else {}),
        )

        def complete(store: Path, documents: TokenisedSet, made_of: dict[str, Any], ours: Claims) -> None:
            units = cut_units(documents, run.featurize.shard_tokens, everywhere)
            todo = [unit for unit in units if not is_finished(store, unit)]
            extract(backend, store, documents, todo, batch_tokens, hidden, encoding, ours, teaching)
            with ours.common():
                if not is_complete(store, made_of):
                    remove_leftovers(store)
                    write_manifest(store, contract, made_of, documents, units, canary)

        if not streaming:
            complete(directory, tokenised, inputs, claims)
            return True
        if kept.documents:
            folder = directory / "kept"
            kept_claims = Claims(folder)
            with kept_claims.common():
                bind(folder, kept_inputs, kept)
                if drafted is not None:
                    drafted.save(folder)
            if not is_complete(folder, kept_inputs):
                complete(folder, kept, kept_inputs, kept_claims)
        with claims.common():
            publish(directory, contract, inputs, tokenised, canary)
        fill(
            spool,
            claims,
            lambda unit: extract_unit(backend, tokenised, unit, batch_tokens, hidden, lambda _tokens: None, teaching),
        )
    return True


def dry_run(run: Run) -> None:
    """Tell what `work` would do."""
    check_wanted(run)
    tell(run.directory, run.data, run.featurize, run.spool, run.target, run.engine, run.draft)


if __name__ == "__main__":
    stage("featurize", work, shared=True, dry_run=dry_run)
