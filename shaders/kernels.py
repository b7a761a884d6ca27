"""The table of compiled kernels: name → Slang module, entry point (with its generic arguments), macros."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """What to compile: `entry` of `module`.slang.

    `defines` are macros for what Slang cannot make generic; `precise` forbids the driver to contract or reorder
    floating-point arithmetic.
    """

    module: str
    entry: str
    defines: tuple[tuple[str, int], ...] = ()
    precise: bool = False


#: Encodings that matrix kernels read, and the Slang type of each (weights.slang).
WEIGHTS = {"f32": "F32W", "f16": "F16W", "bf16": "BF16W", "q8": "Q8W", "q4": "Q4W"}
#: Columns of a lane in linear's lanes variant; more in the kernels that leave scaling to the end of a block.
COLUMNS, CODED_COLUMNS = 2, 4
#: Activations by the number that activation.slang knows them by.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
#: Columns of a lane in the lanes variants of the backward products.
PRODUCT_COLUMNS = (4, 8)
#: Eights of rows of a workgroup where there are many.
MANY_EIGHTS = 4
#: Head widths that have an attention kernel of their own for CPU devices, and those of them that also have one for single
#: tokens with the rotation in it: the wider ones would compile for half a minute and be no faster.
LANES_HEAD_DIMS = (32, 64, 96, 128, 256)
STEP_HEAD_DIMS = (32, 64, 96, 128)


def _linear() -> dict[str, KernelSpec]:
    """linear and gated, in three variants: lanes (8-lane CPU devices; 1 or 8 rows, norm folded in or not), group, tile."""
    table: dict[str, KernelSpec] = {}
    for encoding, weight in WEIGHTS.items():
        for form in ("linear", "gated"):
            for rows, norm in ((1, 0), (1, 1), (8, 0)):
                name = f"{form}_lanes{rows}{'_norm' if norm else ''}_{encoding}"
                columns = CODED_COLUMNS if rows == 1 and encoding in ("q8", "q4") else COLUMNS
                table[name] = KernelSpec("linear_lanes", f"{form}<{weight},{rows},{columns},{norm}>")
            table[f"{form}_group_{encoding}"] = KernelSpec("linear_group", f"{form}<{weight}>")
            table[f"{form}_tile_{encoding}"] = KernelSpec("linear_tile", f"{form}<{weight}>")
        table[f"turn_{encoding}"] = KernelSpec("linear_wide", f"turn<{weight}>")
    for form in ("linear", "gated"):
        table[f"{form}_wide"] = KernelSpec("linear_wide", f"wide{form.title()}")
    table["linear_wide_plain"] = KernelSpec("linear_wide", "widePlain<1>")
    table["linear_wide_many"] = KernelSpec("linear_wide", f"widePlain<{MANY_EIGHTS}>")
    return table


def _rows() -> dict[str, KernelSpec]:
    """What works on rows of activations: norms, attention, embedding, rotary, activations, scores."""
    table: dict[str, KernelSpec] = {}
    for lanes in ("Wave8", "Group32"):
        for name, entry in (("rms_norm", "rms"), ("layer_norm", "layer"), ("query_key_norm", "queryKey")):
            table[f"{name}_{lanes.lower()}"] = KernelSpec("norm", f"{entry}{lanes}")
        for name in ("score", "diverge"):
            table[f"{name}_{lanes.lower()}"] = KernelSpec("score", f"{name}{lanes}")
    for encoding, weight in WEIGHTS.items():
        table[f"embedding_{encoding}"] = KernelSpec("embedding", f"embed<{weight}>")
        table[f"decode_{encoding}"] = KernelSpec("embedding", f"decode<{weight}>")
    for dim in LANES_HEAD_DIMS:
        table[f"attention_lanes_{dim}"] = KernelSpec("attention", f"attendLanes<{dim},0>")
    for dim in STEP_HEAD_DIMS:
        table[f"attention_step_{dim}"] = KernelSpec("attention", f"attendLanes<{dim},1>")
    table["attention_group"] = KernelSpec("attention", "attendGroup")
    table["attention_part"] = KernelSpec("attention", "attendPart")
    table["attention_join"] = KernelSpec("attention", "joinParts")
    table["argmax"] = KernelSpec("argmax", "argmax")
    table["rope_and_cache"] = KernelSpec("rope", "ropeAndCache")
    for kind, activation in enumerate(ACTIVATIONS):
        table[f"activate_{activation}"] = KernelSpec("activation", f"activate<{kind}>")
        table[f"activate_gated_{activation}"] = KernelSpec("activation", f"activateGated<{kind}>")
    table["softcap"] = KernelSpec("activation", "softcap")
    return table


def _products() -> dict[str, KernelSpec]:
    """The products that go backward through a linear layer, and what stores weights narrow after an update."""
    table = {
        f"product_inputs_tile_{e}": KernelSpec("product_tile", f"inputs<{w}>") for e, w in WEIGHTS.items()
    }
    for columns in PRODUCT_COLUMNS:
        for form in ("inputs", "weights"):
            table[f"product_{form}_lanes{columns}"] = KernelSpec("product_lanes", f"{form}<1, {columns}>")
            table[f"product_{form}_many{columns}"] = KernelSpec(
                "product_lanes", f"{form}<{MANY_EIGHTS}, {columns}>"
            )
    for dtype, kind in (("f16", "F16"), ("bf16", "BF16")):
        table[f"narrow_{dtype}"] = KernelSpec("narrow", f"narrow<{kind}>")
    table["product_weights_tile"] = KernelSpec("product_tile", "weightsOf")
    return table


def _experts() -> dict[str, KernelSpec]:
    """Mixtures of experts: routing, and products in which every row has a weight of its own out of a stack."""
    table: dict[str, KernelSpec] = {}
    for encoding, weight in WEIGHTS.items():
        columns = CODED_COLUMNS if encoding in ("q8", "q4") else COLUMNS
        for form in ("linear", "gated"):
            name = f"grouped_{form}"
            table[f"{name}_lanes8_{encoding}"] = KernelSpec("grouped_lanes", f"{form}<{weight},{COLUMNS}>")
            table[f"{name}_lanes1_{encoding}"] = KernelSpec("grouped_lanes", f"{form}Few<{weight},{columns}>")
            table[f"{name}_few_{encoding}"] = KernelSpec("grouped_few", f"{form}<{weight}>")
            table[f"{name}_tile_{encoding}"] = KernelSpec("grouped_tile", f"{form}<{weight}>")
        table[f"grouped_inputs_tile_{encoding}"] = KernelSpec("grouped_tile", f"inputs<{weight}>")
        if encoding != "f32":
            table[f"grouped_inputs_lanes_{encoding}"] = KernelSpec("grouped_lanes", f"inputsOf<{weight}>")
    for columns in PRODUCT_COLUMNS:
        table[f"grouped_inputs_lanes{columns}"] = KernelSpec("grouped_lanes", f"inputs<{columns}>")
        table[f"grouped_linear_wide{columns}"] = KernelSpec("grouped_wide", f"linear<{columns}>")
        table[f"grouped_weights_lanes{columns}"] = KernelSpec("grouped_lanes", f"weightsOf<{columns}>")
    table["grouped_weights_tile"] = KernelSpec("grouped_tile", "weightsOf")
    for lanes in ("Wave8", "Group32"):
        name = lanes.lower()
        table[f"route_{name}"] = KernelSpec("routing", f"route{lanes}")
        table[f"route_back_{name}"] = KernelSpec("routing", f"routeBack{lanes}")
        table[f"sort_experts_{name}"] = KernelSpec("routing", f"sort{lanes}")
        table[f"combine_back_{name}"] = KernelSpec("routing", f"combineBack{lanes}")
        table[f"router_loss_back_{name}"] = KernelSpec("routing_more", f"lossBack{lanes}")
    table["combine"] = KernelSpec("routing", "combine")
    for name, entry in (("router_loss", "loss"), ("add_loads", "addLoads"), ("balance", "balance")):
        table[name] = KernelSpec("routing_more", entry)
    for name, entry in (("expert_squares", "squares"), ("spread", "spread"), ("spread_back", "spreadBack")):
        table[name] = KernelSpec("routing_more", entry)
    return table


#: Functions of one number (unary.slang), by the name of their op.
UNARY = {
    "relu": "Relu",
    "leaky_relu": "LeakyRelu",
    "elu": "Elu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "softplus": "Softplus",
    "mish": "Mish",
}
#: The activations of activation.slang, whose way back is in unary.slang.
BACK = {"silu": "Silu", "gelu_tanh": "GeluTanh", "gelu": "GeluErf"}
#: Losses of a prediction against a target (pair_loss.slang), by the name of their op.
PAIR_LOSSES = {"mse": "Mse", "l1": "L1", "smooth_l1": "SmoothL1", "binary_cross_entropy": "Bce"}
#: What optimizers need besides their updates (optimizer.slang).
OPTIMIZER_PARTS = {
    "advance": "advance",
    "squares": "squares",
    "clip_factor": "clipFactor",
    "rescale": "rescale",
    "unit_norm": "unitNorm",
    "note": "note",
}
#: What flow matching needs (flow.slang), by the name of the kernel.
FLOW = {
    "modulate": "modulate",
    "modulate_back": "modulateBack",
    "add_repeated": "addRepeated",
    "time_embedding": "timeEmbedding",
    "linear_match": "linearMatch",
    "advance_state": "advanceState",
    "guide": "guide",
    "read_clock": "readClock",
    "masked_mse": "maskedMse",
    "masked_mse_end": "maskedMseEnd",
    "masked_mse_back": "maskedMseBack",
    "uniforms": "uniforms",
    "normals": "normals",
    "drop_ids": "dropIds",
    "drop_rows": "dropRows",
}
#: Head widths that have training attention of their own for CPU devices.
TRAIN_HEAD_DIMS = (16, 32, 64)
#: Recurrent cells (recurrent.slang), and how many gates they have.
CELL_GATES = {"rnn": 1, "gru": 3}


def _training() -> dict[str, KernelSpec]:
    """Gradients of what is not a product, losses, and attention over whole sequences."""
    table: dict[str, KernelSpec] = {}
    for name, function in UNARY.items():
        table[f"unary_{name}"] = KernelSpec("unary", f"forward<{function}>")
        table[f"unary_{name}_back"] = KernelSpec("unary", f"backward<{function}>")
    for name, function in BACK.items():
        table[f"activate_{name}_back"] = KernelSpec("unary", f"backward<{function}>")
        table[f"activate_gated_{name}_back"] = KernelSpec("unary", f"gatedBackward<{function}>")
    for lanes in ("Wave8", "Group32"):
        table[f"norm_back_{lanes.lower()}"] = KernelSpec("norm_back", f"back{lanes}")
        table[f"cross_entropy_{lanes.lower()}"] = KernelSpec("loss", f"forward{lanes}")
        table[f"cross_entropy_back_{lanes.lower()}"] = KernelSpec("loss", f"back{lanes}")
        table[f"softmax_{lanes.lower()}"] = KernelSpec("softmax", f"forward{lanes}")
        table[f"softmax_back_{lanes.lower()}"] = KernelSpec("softmax", f"back{lanes}")
    table["column_sums"] = KernelSpec("norm_back", "columnSums")
    for name, function in PAIR_LOSSES.items():
        table[name] = KernelSpec("pair_loss", f"forward<{function}>")
        table[f"{name}_back"] = KernelSpec("pair_loss", f"back<{function}>")
    table["softcap_back"] = KernelSpec("unary", "backward<Softcap>")
    for name in ("draw", "bits", "dropout"):
        table[name] = KernelSpec("random", name)
    for name, entry in FLOW.items():
        table[name] = KernelSpec("flow", entry)
    table["tally_sum"] = KernelSpec("tally", "addWeighted", precise=True)
    table["tally_hits"] = KernelSpec("tally", "countHits")
    for name in ("fill", "axpy", "scale", "multiply", "swap", "sum", "columns"):
        table[name] = KernelSpec("train_rows", name)
    for variant, entry in (("lanes", "blockLanes"), ("group", "blockGroup")):
        for encoding, codes in (("q4", "Q4Codes"), ("q8", "Q8Codes")):
            table[f"scale_gradient_{variant}_{encoding}"] = KernelSpec("scales", f"{entry}<{codes}>")
    table["diverge_back"] = KernelSpec("score", "divergeBack")
    table["embedding_back"] = KernelSpec("train_rows", "embedBack")
    table["embedding_back_lanes"] = KernelSpec("train_rows", "embedBackLanes")
    table["embedding_back_few"] = KernelSpec("train_rows", "embedBackFew")
    for name in ("Sgd", "Adam", "Muon", "Apply"):
        table[f"update_{name.lower()}"] = KernelSpec("optimizer", f"update<{name}>")
    for name, entry in OPTIMIZER_PARTS.items():
        table[name] = KernelSpec("optimizer", entry)
    table["rotate"] = KernelSpec("attention_train", "rotate")
    for part in ("forward", "queries", "keys"):
        table[f"attend_{part}_group"] = KernelSpec("attention_train", f"{part}Group")
        for dims in TRAIN_HEAD_DIMS:
            table[f"attend_{part}_lanes_{dims}"] = KernelSpec("attention_train", f"{part}Lanes<{dims}>")
    for cell, gates in CELL_GATES.items():
        for part in ("forward", "back"):
            for way in ("lanes", "group", "step"):
                entry = f"{part}{way.capitalize()}<{gates}>"
                table[f"{cell}_{part}_{way}"] = KernelSpec("recurrent", entry)
    return table


#: How images are given another size (pooling.slang).
RESIZES = ("adaptive", "nearest", "bilinear")


def _images() -> dict[str, KernelSpec]:
    """Layers of images: convolutions, pooling, norms of channels; and vector quantizers."""
    table = {name: KernelSpec("windows", name) for name in ("unfold", "fold")}
    table["permute"] = KernelSpec("permute", "permute")
    table["conv_wide"] = KernelSpec("convolution_wide", "wide")
    table["conv_outputs"] = KernelSpec("convolution", "directOutputs")
    table["conv_inputs"] = KernelSpec("convolution", "directInputs")
    for lanes in ("Wave8", "Group32"):
        table[f"conv_weights_{lanes.lower()}"] = KernelSpec("convolution", f"directWeights{lanes}")
        table[f"channel_sums_{lanes.lower()}"] = KernelSpec("convolution", f"channelSums{lanes}")
        table[f"batch_stats_{lanes.lower()}"] = KernelSpec("batch_norm", f"stats{lanes}")
        table[f"batch_norm_sums_{lanes.lower()}"] = KernelSpec("batch_norm", f"sums{lanes}")
        for name, entry in (
            ("half_norms", "halfNorms"),
            ("follow", "follow"),
            ("revive", "revive"),
            ("choose", "choose"),
        ):
            table[f"codes_{name}_{lanes.lower()}"] = KernelSpec("quantizer", f"{entry}{lanes}")
    table["codes_gather"] = KernelSpec("quantizer", "gather")
    table["kept_stats"] = KernelSpec("batch_norm", "keptStats")
    table["batch_norm"] = KernelSpec("batch_norm", "normalise")
    table["batch_norm_back"] = KernelSpec("batch_norm", "normaliseBack")
    for name, entry in (("max_pool", "maxPool"), ("average_pool", "averagePool")):
        table[name] = KernelSpec("pooling", entry)
        table[f"{name}_back"] = KernelSpec("pooling", f"{entry}Back")
    for name in RESIZES:
        table[f"resize_{name}"] = KernelSpec("pooling", f"resize<{name.title()}>")
        table[f"resize_{name}_back"] = KernelSpec("pooling", f"resizeBack<{name.title()}>")
    return table


#: Widths of the tiles of a state in the recurrence of Mamba-3 on CPU devices.
MAMBA3_TILES = (16, 32)
#: Its kernels that reduce within a workgroup: module, then the name and the entry point of each; and those of them that have
#: a variant for sizes and places that are even, on CPU devices.
MAMBA3_ROWS = {
    "operands": {"coefs": "coefs", "gains": "gains", "walk": "walk"},
    "operands_back": {
        "gains_back": "gainsBack",
        "walk_back": "walkBack",
        "scalars_back": "scalarsBack",
        "fold": "fold",
    },
    "gate": {"gate": "gate"},
    "gate_back": {"gate_back": "gateBack"},
    "start": {"start_back": "startBack"},
    "step": {"step": "step"},
}
MAMBA3_EVEN = ("step", "walk", "walk_back", "fold", "gate", "gate_back")


def _mamba3() -> dict[str, KernelSpec]:
    """The Mamba-3 block between its two linear layers."""
    table = {
        f"mamba3_sweep_lanes_{d}{'_one' if one else ''}": KernelSpec("mamba3_scan", f"sweepLanes<{d},{one}>")
        for d in MAMBA3_TILES
        for one in (0, 1)
    }
    table["mamba3_sweep_group"] = KernelSpec("mamba3_scan", "sweepGroup")
    table["mamba3_pass"] = KernelSpec("mamba3_scan", "pass")
    table["mamba3_spread"] = KernelSpec("mamba3_gate", "spread")
    table["mamba3_spread_back"] = KernelSpec("mamba3_gate_back", "spreadBack")
    table["mamba3_start"] = KernelSpec("mamba3_start", "start")
    for module, entries in MAMBA3_ROWS.items():
        for name, kernel in entries.items():
            even = name in MAMBA3_EVEN
            found = {"wave8": f"{kernel}Wave8{'<Any>' if even else ''}", "group32": f"{kernel}Group32"}
            found |= {"even": f"{kernel}Wave8<Even>"} if even else {}
            for variant, entry in found.items():
                table[f"mamba3_{name}_{variant}"] = KernelSpec(f"mamba3_{module}", entry)
    return table


KERNELS: dict[str, KernelSpec] = {
    **_images(),
    **_mamba3(),
    **_training(),
    **_products(),
    **_experts(),
    **_rows(),
    "add_f32": KernelSpec("elementwise", "add"),
    **{
        f"pack_{target}_{source}": KernelSpec(
            "pack", f"pack{target.upper()}<{source.upper()}Source>", precise=True
        )
        for target in ("q4", "q8")
        for source in ("f32", "f16", "bf16")
    },
    **{
        f"pack_{target}_f32_wide": KernelSpec("pack", f"pack{target.upper()}<F32WideSource>", precise=True)
        for target in ("q4", "q8")
    },
    **{
        f"encode_{target}_{source}": KernelSpec("encode", f"encode{target.upper()}<{source.upper()}Source>")
        for target in ("q4", "q8")
        for source in ("f32", "f16", "bf16")
    },
    "feedback_q4": KernelSpec("feedback", "feedbackQ4"),
    "refine_q4": KernelSpec("refine", "refineQ4"),
    **_linear(),
}
