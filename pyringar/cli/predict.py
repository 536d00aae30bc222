"""``pyringar predict``: all-reduce and step times on a machine that you describe."""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pyringar.choices import check_choice
from pyringar.cli.parser import add_json_option
from pyringar.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from pyringar.predict import Backward, Link, Network, Workload

__all__ = ["add_parser", "run"]

_MOST_RANKS = 1 << 16
_MOST_IMAGES = 1 << 20

_DESCRIPTION = """\
Predict how long every algorithm takes to sum the gradients of a model on a
machine that you describe by its ranks, links and nodes. The engine's own
schedules are run message by message over those links; nothing is sent, and no
GPU is needed."""
_EPILOG = """\
examples:
  the 16-GPU machine of the book, and a step that computes for 120 ms:
    pyringar predict --model resnet18 --ranks 16 --link pcie3 --compute-ms 120
  1,024 GPUs, 8 in each of 128 nodes:
    pyringar predict --model resnet18 --ranks 8,64,1024 --ranks-per-node 8 \\
        --link nvlink4 --node-link 100gbe --compute-ms 120 --plot scaling.png
  any link:
    pyringar predict --bytes 160000000 --link custom --bandwidth-gbps 16
  this machine's memory, predicted and measured:
    pyringar predict --link cpu --ranks 2,4
"""


def add_parser(subparsers: Any) -> None:
    """Add ``predict`` to the command line."""
    parser = subparsers.add_parser(
        "predict",
        help="predict all-reduce and step times on a machine that you describe",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_workload_options(parser.add_argument_group("what is reduced"))
    _add_machine_options(parser.add_argument_group("the machine"))
    group = parser.add_argument_group("output")
    group.add_argument("--plot", metavar="FILE.png", help="draw the rows")
    add_json_option(group)
    parser.set_defaults(run=run)


def _add_workload_options(group: Any) -> None:
    add, which = group.add_argument, group.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        choices=("lenet", "resnet18"),
        help="the gradients of a trainer's model (resnet18)",
    )
    which.add_argument(
        "--bytes", type=int, metavar="N", help="one float32 tensor of N bytes instead"
    )
    add(
        "--compute-ms",
        metavar="C",
        help="forward and backward of one rank in milliseconds, or `measure` to time them on this "
        "CPU; without it, no steps are predicted",
    )
    add("--batch-size", type=int, default=64, metavar="N", help="images a rank, to measure (64)")
    for name, default in (("--bucket-cap-mb", 10), ("--first-bucket-mb", 1)):
        help_text = f"as in the bucketer ({default})"
        add(name, type=float, default=default, metavar="MB", help=help_text)
    add(
        "--packed",
        action="store_true",
        help="tensors of a call are packed into one first; else naive, ring and what is made of "
        "rings take one after the other, as the engine does",
    )


def _add_machine_options(group: Any) -> None:
    add, nodes = group.add_argument, group.add_mutually_exclusive_group()
    add("--ranks", default="2,4,8,16", metavar="K,K,...", help="numbers of ranks (2,4,8,16)")
    add(
        "--link",
        default="nvlink4",
        metavar="NAME",
        help="between the ranks of a node: nvlink4, pcie3, pcie4, pcie5, 100gbe, custom; or cpu: "
        "ranks in this machine's memory, predicted and measured (nvlink4)",
    )
    help_text = "GB/s (10**9 bytes) each way, of --link"
    add("--bandwidth-gbps", type=float, metavar="B", help=help_text)
    add("--latency-us", type=float, metavar="L", help="of a message, of --link")
    help_text = "of a node: switch, or ring for wires between neighbours only (switch)"
    add("--wiring", default="switch", metavar="HOW", help=help_text)
    nodes.add_argument("--nodes", type=int, metavar="N", help="nodes that share the ranks (1)")
    nodes.add_argument(
        "--ranks-per-node", type=int, metavar="L", help="instead: as many nodes as it takes"
    )
    add("--node-link", default="100gbe", metavar="NAME", help="between nodes (100gbe)")
    add("--node-bandwidth-gbps", type=float, metavar="B", help="of --node-link")
    add("--node-latency-us", type=float, metavar="L", help="of --node-link")
    add("--nics-per-node", type=int, default=1, metavar="N", help="network cards of a node (1)")


def run(args: argparse.Namespace) -> int:
    """Predict; print the table, write the files."""
    from pyringar.cli.paths import check_output_path
    from pyringar.predict import plot, predict, report

    if args.plot is not None:
        args.plot = check_output_path("--plot", args.plot)
    if args.link == "cpu":
        _run_cpu(args)
        return 0
    networks = _networks(args)
    forecast = predict(_workload(args), networks)
    _print(args, report.as_dict(forecast), report.render(forecast))
    if args.plot is not None:
        plot.save_plot(forecast, args.plot)
        if not args.json:
            print(f"\nplot       {args.plot}")
    return 0


def _print(args: argparse.Namespace, figures: Mapping[str, Any], table: str) -> None:
    print(json.dumps(figures, indent=1) if args.json else table)


def _run_cpu(args: argparse.Namespace) -> None:
    """Predict and measure in this machine's memory."""
    from pyringar.predict.cpu import compare_cpu, render_cpu

    if args.plot is not None:
        raise ArgumentError(f"--plot is '{args.plot}', but --link cpu prints a table only")
    sizes_bytes = [2**25, 2**26]
    if args.bytes is not None or args.model is not None:
        sizes_bytes = [_workload(args).nbytes]
    rows = compare_cpu(_ranks(args.ranks), sizes_bytes)
    figures = {"is_prediction": False, "rows": [asdict(row) for row in rows]}
    _print(args, figures, render_cpu(rows))


def _ranks(text: str) -> list[int]:
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        ranks = [0]
    if min(ranks) < 1 or max(ranks) > _MOST_RANKS:
        raise ArgumentError(
            f"--ranks is {text!r}, expected whole numbers, 1 or more (to {_MOST_RANKS}): 2,4,8"
        )
    return sorted(set(ranks))


def _networks(args: argparse.Namespace) -> list[Network]:
    from pyringar.predict import Network
    from pyringar.predict.network import check_count

    link, node_link = _link(args, ""), _link(args, "node_")
    networks = []
    for ranks in _ranks(args.ranks):
        nodes = 1 if args.nodes is None else check_count("--nodes", args.nodes)
        if args.ranks_per_node is not None:
            nodes = -(-ranks // check_count("--ranks-per-node", args.ranks_per_node))
        if ranks % nodes:
            raise ArgumentError(f"--ranks is {ranks}, expected a multiple of the {nodes} nodes")
        networks.append(Network(ranks, link, nodes, node_link, args.nics_per_node, args.wiring))
    return networks


def _link(args: argparse.Namespace, prefix: str) -> Link:
    from pyringar.predict import LINKS, named_link

    option, given = f"--{prefix}link".replace("_", "-"), vars(args)
    others = ("custom",) if prefix else ("custom", "cpu")  # which is asked for before
    name = check_choice(option, given[f"{prefix}link"], (*LINKS, *others))
    figures = {figure: given[prefix + figure] for figure in ("bandwidth_gbps", "latency_us")}
    try:
        return named_link(name, option=option, **figures)
    except ArgumentError as error:
        begins_with_a_figure = str(error).startswith(tuple(figures))
        raise ArgumentError(f"{prefix if begins_with_a_figure else ''}{error}") from None


def _workload(args: argparse.Namespace) -> Workload:
    from pyringar.parallel.bucket_params import check_caps
    from pyringar.predict import Workload

    check_caps(**{"--bucket-cap-mb": args.bucket_cap_mb, "--first-bucket-mb": args.first_bucket_mb})
    compute_s = _compute_s(args.compute_ms)
    if args.bytes is not None:
        name, tensors, backward = _tensor(args.bytes, compute_s)
    else:
        name, tensors, backward = _model(args.model or "resnet18", compute_s, args.batch_size)
    caps = args.bucket_cap_mb, args.first_bucket_mb
    return Workload(name, tensors, backward, *caps, args.packed)


def _compute_s(text: str | None) -> float | None:
    """Return seconds; 0 to measure them, None to predict no steps."""
    if text is None:
        return None
    if text == "measure":
        return 0.0
    try:
        compute_ms = float(text)
    except ValueError:
        compute_ms = 0.0
    if not (math.isfinite(compute_ms) and compute_ms > 0):
        raise ArgumentError(
            f"--compute-ms is {text!r}, expected a positive number of milliseconds or `measure`"
        )
    return compute_ms * 1e-3


# A workload's title, its numbers of elements, and when the gradients are ready.
_Gradients = tuple[str, tuple[int, ...], "Backward | None"]


def _tensor(nbytes: int, compute_s: float | None) -> _Gradients:
    from pyringar.predict import Backward
    from pyringar.predict.algorithms import ITEM_BYTES

    if not ITEM_BYTES <= nbytes < 2**63 or nbytes % ITEM_BYTES:
        raise ArgumentError(
            f"--bytes is {nbytes}, expected a positive multiple of {ITEM_BYTES}, the bytes "
            "of a float32, below 2^63"
        )
    if compute_s == 0:
        raise ArgumentError("--compute-ms is 'measure', which needs a --model")
    backward = None if compute_s is None else Backward.at_the_end(1, compute_s)
    return "a tensor", (nbytes // ITEM_BYTES,), backward


def _model(name: str, compute_s: float | None, batch_size: int) -> _Gradients:
    import torch

    from pyringar.predict import Backward
    from pyringar.predict.network import check_count
    from pyringar.train import lenet, lenet_params, resnet18
    from pyringar.train.config import MODEL_TITLES

    if batch_size > _MOST_IMAGES:
        raise ArgumentError(f"--batch-size is {batch_size}, expected at most {_MOST_IMAGES}")
    device = "cpu" if compute_s == 0 else "meta"
    images = torch.zeros(check_count("--batch-size", batch_size), 1, 28, 28, device=device)
    params: list[Tensor]
    if name == "lenet":
        params = [p.to(device).requires_grad_() for p in lenet_params()]
        model: Callable[[Tensor], Tensor] = functools.partial(lenet, params=params)
    else:
        model = resnet18().to(device)
        params = list(model.parameters())
    backward = None
    if compute_s == 0:
        backward = Backward.measured(params, lambda: model(images).sum())
    elif compute_s is not None:
        backward = Backward.by_flops(params, lambda: model(images).sum(), compute_s)
    return MODEL_TITLES[name], tuple(param.numel() for param in params), backward
