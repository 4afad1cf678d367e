"""`python -m train` with a log of what it trains on: a line (row seed, documents) per pack in $RECORD.<rank>, and of
the learning rate that AdamW has at each of its updates: a line in $RECORD.<rank>.rates.

With STOP_AFTER=n it asks itself to stop, as a cluster would, in its n-th pack.
"""

import json
import os
import signal

from torch.optim.optimizer import register_optimizer_step_pre_hook

from conf import stage
from train.__main__ import main
from train.objective import Objective

forward = Objective.forward
path = f"{os.environ['RECORD']}.{os.environ.get('RANK', '0')}"
record, rates = open(path, "w"), open(f"{path}.rates", "w")  # noqa: SIM115
seen = 0


def recording(self, pack, counts, seed):
    global seen
    if pack is not None:
        print(json.dumps([seed, pack.documents]), file=record, flush=True)
        seen += 1
        if seen == int(os.environ.get("STOP_AFTER", "-1")):
            os.kill(os.getpid(), signal.SIGTERM)
    return forward(self, pack, counts, seed)


def updating(optimizer, args, kwargs):
    print(optimizer.param_groups[0]["lr"], file=rates, flush=True)


Objective.forward = recording  # type: ignore[method-assign]
register_optimizer_step_pre_hook(updating)
stage("train", main)
