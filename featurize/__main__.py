"""`python -m featurize experiment=demo`: conversations -> token ids and spans -> hidden states in a feature store.

Run again, it goes on where it stopped; with everything there it returns at once, without loading the model. Run many
times at once, on any machines that see the folder, the processes share the units; each returns when all are done.
"""

from __future__ import annotations

from conf import Run, stage
from featurize.backends import checked_backend
from featurize.claims import Claims
from featurize.contract import FeatureContract, dtype_name
from featurize.encoding import require_encoding
from featurize.extract import Widths, check_space, extract
from featurize.store import (
    cut_units,
    is_complete,
    is_finished,
    record_inputs,
    remove_leftovers,
    require_inputs,
    write_manifest,
)
from featurize.tokenised import describe_inputs, load_or_tokenise
from models.target import aux_layers, describe_target


def work(run: Run) -> bool:
    """Make the run's features; False when they are complete already."""
    directory = run.directory / "features"
    target = describe_target(run.target)
    layers = aux_layers(target, run.target.aux_layers)
    encoding, everywhere = run.featurize.encoding, run.featurize.final_everywhere
    require_encoding(encoding, target.hidden_size)
    inputs = describe_inputs(
        run.data, target, layers, run.featurize.shard_tokens, encoding, run.featurize.backend, everywhere
    )
    claims = Claims(directory)
    with claims.common():
        require_inputs(directory, inputs)
        if is_complete(directory, inputs):
            return False
        tokenised = load_or_tokenise(directory, run.data, target, run.target, inputs)
    units = cut_units(tokenised, run.featurize.shard_tokens, everywhere)
    todo = [unit for unit in units if not is_finished(directory, unit)]
    check_space(directory, tokenised, units, todo, Widths(target.hidden_size, len(layers), encoding))

    opened = checked_backend(target, layers, tokenised, run.featurize, run.target, run.engine, run.directory)
    with opened as (backend, canary):
        with claims.common():
            require_inputs(directory, inputs)  # another launch may have bound the folder meanwhile
            record_inputs(directory, inputs)
        extract(backend, directory, tokenised, todo, run.featurize.batch_tokens, target.hidden_size, encoding, claims)
        contract = FeatureContract(
            target_config=target.config_hash,
            target_weights=target.weights_hash,
            hidden_size=target.hidden_size,
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
        )
    with claims.common():
        if not is_complete(directory, inputs):
            remove_leftovers(directory)
            write_manifest(directory, contract, inputs, tokenised, units, canary)
    return True


if __name__ == "__main__":
    stage("featurize", work, shared=True)
