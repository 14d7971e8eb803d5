"""MAE and CAE written as loops over images, tokens and attention heads, from the parameters of the method."""

import math

import torch
from torch import Tensor


def layer_norm(x: Tensor, norm) -> Tensor:
    """Normalize one token (C,)."""
    mean = x.mean()
    variance = ((x - mean) ** 2).mean()
    return (x - mean) / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias


def linear(x: Tensor, layer) -> Tensor:
    return layer.weight @ x + layer.bias


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def mlp(x: Tensor, layers) -> Tensor:
    return linear(gelu(linear(x, layers.fc1)), layers.fc2)


def attend(queries: list[Tensor], keys: list[Tensor], values: list[Tensor], heads: int) -> list[Tensor]:
    """Attention of every query to every key, head by head."""
    width = len(queries[0]) // heads
    outputs = []
    for query in queries:
        parts = []
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            weights = torch.stack([query[part] @ key[part] / math.sqrt(width) for key in keys]).exp()
            weights = weights / weights.sum()
            parts.append(sum(w * value[part] for w, value in zip(weights, values, strict=True)))
        outputs.append(torch.cat(parts))
    return outputs


def block(tokens: list[Tensor], layer) -> list[Tensor]:
    """One pre-norm transformer block of timm."""
    normed = [layer_norm(x, layer.norm1) for x in tokens]
    width = len(tokens[0])
    qkv = [linear(x, layer.attn.qkv) for x in normed]
    found = attend(*[[x[i * width : (i + 1) * width] for x in qkv] for i in range(3)], layer.attn.num_heads)
    scale1, scale2 = (getattr(scale, "gamma", 1.0) for scale in (layer.ls1, layer.ls2))
    tokens = [x + scale1 * linear(a, layer.attn.proj) for x, a in zip(tokens, found, strict=True)]
    return [x + scale2 * mlp(layer_norm(x, layer.norm2), layer.mlp) for x in tokens]


def patch_pixels(image: Tensor, number: int, size: int) -> Tensor:
    """Pixels of a patch, row by row, the three channels of a pixel together."""
    per_row = image.shape[2] // size
    top, left = number // per_row * size, number % per_row * size
    return torch.stack([image[c, top + i, left + j] for i in range(size) for j in range(size) for c in range(3)])


def encode(vit, image: Tensor, patches: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Prefix tokens and patch tokens of a ViT that gets only the given patches."""
    size, projection = vit.patch_embed.patch_size[0], vit.patch_embed.proj
    kernel = projection.weight.permute(0, 2, 3, 1).flatten(1)  # in the order of `patch_pixels`
    prefix = vit.num_prefix_tokens
    special = [token for part in (vit.cls_token, vit.reg_token) if part is not None for token in part[0]]
    tokens = [token + vit.pos_embed[0, i] for i, token in enumerate(special)]
    for number in patches:
        token = kernel @ patch_pixels(image, number, size) + projection.bias
        tokens.append(token + vit.pos_embed[0, prefix + number])
    for layer in vit.blocks:
        tokens = block(tokens, layer)
    norm = vit.fc_norm if isinstance(vit.norm, torch.nn.Identity) else vit.norm
    tokens = [layer_norm(x, norm) for x in tokens]
    return tokens[:prefix], tokens[prefix:]


def target(image: Tensor, number: int, size: int, normalized: bool) -> Tensor:
    pixels = patch_pixels(image, number, size)
    if not normalized:
        return pixels
    mean = pixels.mean()
    variance = ((pixels - mean) ** 2).sum() / (len(pixels) - 1)
    return (pixels - mean) / torch.sqrt(variance + 1e-6)


def mae_loss(method, images: Tensor, visible: list[list[int]]) -> Tensor:
    """Mean over all images, masked patches and pixels of the squared error."""
    errors = []
    for image, seen in zip(images, visible, strict=True):
        prefix, patches = encode(method.encoder, image, seen)
        tokens = [linear(x, method.decoder_embed) for x in prefix]
        for number in range(method.patches):
            if number in seen:
                tokens.append(linear(patches[seen.index(number)], method.decoder_embed))
            else:
                tokens.append(method.decoder.mask_token[0, 0])
        tokens = [x + method.decoder.pos_embed[0, i] for i, x in enumerate(tokens)]
        for layer in method.decoder.blocks:
            tokens = block(tokens, layer)
        for number in range(method.patches):
            if number not in seen:
                output = layer_norm(tokens[len(prefix) + number], method.decoder.norm)
                wanted = target(image, number, method.patch_size, method.config.normalize_pixels)
                errors += list((linear(output, method.decoder_head) - wanted) ** 2)
    return torch.stack(errors).mean()


def cae_loss(method, images: Tensor, visible: list[list[int]], codes: Tensor | None = None) -> Tensor:
    """Error of the pixels, or cross-entropy of the nearest of `codes`, plus the weighted alignment error."""
    main, alignment = [], []
    for image, seen in zip(images, visible, strict=True):
        masked = [number for number in range(method.patches) if number not in seen]
        _, context = encode(method.encoder, image, seen)
        with torch.no_grad():
            _, wanted_features = encode(method.encoder, image, masked)
        positions = method.positions
        tokens = [method.mask_token[0, 0] for _ in masked]
        for layer in method.regressor:
            everything, places = [*context, *tokens], [*seen, *masked]
            weight, bias = layer.attention.in_proj_weight.chunk(3), layer.attention.in_proj_bias.chunk(3)
            query = [layer_norm(x + positions[p], layer.norm_query) for x, p in zip(tokens, masked, strict=True)]
            key = [layer_norm(x + positions[p], layer.norm_key) for x, p in zip(everything, places, strict=True)]
            value = [layer_norm(x, layer.norm_value) for x in everything]
            q, k, v = ([w @ x + b for x in part] for w, b, part in zip(weight, bias, (query, key, value), strict=True))
            found = attend(q, k, v, layer.attention.num_heads)
            updated = []
            for x, a in zip(tokens, found, strict=True):
                y = x + layer.scale_attention.gamma * linear(a, layer.attention.out_proj)
                y = layer_norm(y, layer.norm)
                updated.append(y + layer.scale_mlp.gamma * mlp(y, layer.mlp))
            tokens = updated
        features = [layer_norm(x, method.regressor_norm) for x in tokens]
        for feature, wanted in zip(features, wanted_features, strict=True):
            alignment += list((feature - wanted) ** 2)
        tokens = [x + positions[p] for x, p in zip(features, masked, strict=True)]
        *layers, norm, head = method.decoder
        for layer in layers:
            tokens = block(tokens, layer)
        for x, number in zip(tokens, masked, strict=True):
            output = linear(layer_norm(x, norm), head)
            if codes is None:
                main += list((output - target(image, number, method.patch_size, method.config.normalize_pixels)) ** 2)
            else:
                pixels = patch_pixels(image, number, method.patch_size)
                token = min(range(len(codes)), key=lambda v: float(((pixels - codes[v]) ** 2).sum()))
                main.append(-torch.log(output.exp()[token] / output.exp().sum()))
    return torch.stack(main).mean() + method.config.alignment_weight * torch.stack(alignment).mean()
