"""`python -m featurize experiment=demo`: conversations -> token ids and spans -> hidden states in a feature store.

Run again, it goes on where it stopped; with everything there it returns at once, without loading the model.
"""

from __future__ import annotations

import transformers

from conf import Run, stage
from featurize.canary import run_canary
from featurize.contract import ENCODING, FeatureContract, dtype_name
from featurize.extract import check_space, extract, load_backend
from featurize.store import cut_units, finished_record, is_complete, record_inputs, require_inputs, write_manifest
from featurize.tokenised import describe_inputs, load_or_tokenise
from models.target import aux_layers, describe_target


def work(run: Run) -> bool:
    """Make the run's features; False when they are complete already."""
    directory = run.directory / "features"
    target = describe_target(run.target)
    layers = aux_layers(target, run.target.aux_layers)
    inputs = describe_inputs(run.data, target, layers, run.featurize.shard_tokens, ENCODING)
    require_inputs(directory, inputs)
    if is_complete(directory, inputs):
        return False

    tokenised = load_or_tokenise(directory, run.data, target, run.target, inputs)
    units = cut_units(tokenised, run.featurize.shard_tokens)
    todo = [unit for unit in units if finished_record(directory, unit) is None]
    check_space(directory, tokenised, units, todo, target.hidden_size, len(layers))

    backend = load_backend(target, run.target, layers, run.featurize.device)
    canary = run_canary(backend, tokenised, run.featurize.canary_documents)
    record_inputs(directory, inputs)
    extract(backend, directory, tokenised, todo, run.featurize.batch_tokens, target.hidden_size)

    contract = FeatureContract(
        target_config=target.config_hash,
        target_weights=target.weights_hash,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=dtype_name(target.dtype),
        aux_layers=layers,
        encoding=ENCODING,
        final="post_norm",
        tokenizer=inputs["target tokenizer and chat template"],
        backend="transformers",
        backend_version=transformers.__version__,
    )
    write_manifest(directory, contract, inputs, tokenised, units, canary)
    return True


if __name__ == "__main__":
    stage("featurize", work)
