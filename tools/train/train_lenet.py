#!/usr/bin/env python3
"""Trains the LeNet-5 that the built-in `lenet` kernel serves, and writes its committed files.

    python3 -m venv /tmp/venv-train && /tmp/venv-train/bin/pip install -r tools/train/requirements.txt
    /tmp/venv-train/bin/python tools/train/train_lenet.py [--mnist DIR]

Only a developer who wants other weights runs this; building and running Serval never does. It writes

    device/models/lenet_weights.h      weights in the order device/models/lenet.h reads them
    device/models/digits_heldout.bin   digits that took no part in training, with their labels
    device/models/lenet_golden.bin     pictures and the logits a float64 reference gives for them

(formats: device/models/README.md).

Data. The 1797 handwritten digits of UCI "Optical Recognition of Handwritten Digits" (test part) that scikit-learn
ships: real scans, 8x8, 0..16. Each is resized to 20x20 by Catmull-Rom interpolation, scaled to 0..255 and pasted
into 28x28 so that its centre of mass is in the middle: the same geometry as MNIST (LeCun et al. 1998), because that
is what users will send. One fifth of each class, drawn with a fixed seed, is held out. The split is by picture, not
by writer: the data does not name its writers. With --mnist DIR the four MNIST IDX files (plain or .gz) join: the
60 000 are trained on as well, the 10 000 are only reported (add --epochs 12, or it takes hours).

Network. LeNet-5 (LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", 1998)
with ReLU and max pooling: 28x28 padded by 2 -> conv 5x5 x6 -> pool -> conv 5x5 x16 -> pool -> 120 -> 84 -> 10.

Repeatability. Every random draw comes from one seeded generator and uses only its integer and uniform streams; BLAS
runs on one thread with one fixed kernel set (any x86-64 with AVX2); exponentials go through math.exp. The same
package versions therefore write the same bytes. The schedule is fixed: held-out digits influence no choice.
"""

import argparse
import gzip
import math
import os
import struct
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OPENBLAS_CORETYPE"] = "Haswell"

import numpy as np  # noqa: E402  (after the BLAS settings)

MODELS = Path(__file__).resolve().parents[2] / "device" / "models"
SEED = 1998
HELD_OUT = 0.2
BATCH = 64
EPOCHS = 240
PEAK_RATE = 2e-3
DECAY = 1e-4

# --- data ---------------------------------------------------------------------------------------------------------


def resize_matrix(source, target):
    """Rows of Catmull-Rom weights that take `source` samples to `target` samples, edges clamped."""
    matrix = np.zeros((target, source))
    for row in range(target):
        centre = (row + 0.5) * source / target - 0.5
        base = math.floor(centre)
        for tap in range(base - 1, base + 3):
            t = abs(centre - tap)
            near = 1.5 * t**3 - 2.5 * t**2 + 1
            far = -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2
            matrix[row, min(max(tap, 0), source - 1)] += near if t < 1 else far
    return matrix


def like_mnist(small):
    """8x8 values 0..16 -> 28x28 u8: a 20x20 digit whose centre of mass is the centre of the picture."""
    resize = resize_matrix(8, 20)
    digit = np.clip(resize @ small @ resize.T, 0, 16) * (255 / 16)
    digit = np.floor(digit + 0.5)
    mass = digit.sum()
    place = []
    for axis in (0, 1):
        centre = (digit.sum(axis=1 - axis) * np.arange(20)).sum() / mass
        place.append(min(max(math.floor(14 - centre), 0), 8))  # the middle of pixels 0..27 is 13.5; floor(13.5 - c + 0.5)
    picture = np.zeros((28, 28), np.uint8)
    picture[place[0] : place[0] + 20, place[1] : place[1] + 20] = digit
    return picture


def scanned_digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.stack([like_mnist(image) for image in data.images]), data.target.astype(np.uint8)


def split(labels, rng):
    """Indices (train, held out): HELD_OUT of each class, drawn without looking at the pictures."""
    held = []
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(labels == digit))
        held.extend(members[: round(HELD_OUT * len(members))])
    held = np.sort(np.array(held))
    return np.setdiff1d(np.arange(len(labels)), held), held


def read_idx(folder, name):
    """One IDX file (http://yann.lecun.com/exdb/mnist), plain or gzipped."""
    for path, opener in ((folder / name, open), (folder / (name + ".gz"), gzip.open)):
        if path.exists():
            with opener(path, "rb") as file:
                data = file.read()
            if data[:3] != b"\0\0\x08":
                sys.exit(f"{path} is not an IDX file of bytes")
            dims = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
            return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(dims)
    sys.exit(f"{folder} holds neither {name} nor {name}.gz; download the four MNIST files into it")


def augment(pictures, rng):
    """u8 (n,28,28) -> float32 0..1, each shifted, rotated, scaled, sheared, bent and re-contrasted at random."""
    n = len(pictures)
    spread = lambda half: rng.random((n, 1, 1)) * 2 * half - half
    angle, shear = spread(0.22), spread(0.2)
    zoom_x, zoom_y = 1 + spread(0.15), 1 + spread(0.15)
    # Elastic noise: a 6x6 grid of random displacements, interpolated to every pixel.
    bend = resize_matrix(6, 28)
    grid = np.arange(28) - 13.5
    y, x = grid[None, :, None], grid[None, None, :]
    sine = angle - angle**3 / 6
    cosine = 1 - angle**2 / 2
    elastic = [bend @ (rng.random((n, 6, 6)) * 2.4 - 1.2) @ bend.T for _ in range(2)]
    from_x = (cosine * x - (sine + shear) * y) * zoom_x + 13.5 + spread(2.0) + elastic[0]
    from_y = (sine * x + cosine * y) * zoom_y + 13.5 + spread(2.0) + elastic[1]

    padded = np.zeros((n, 32, 32), np.float32)  # two empty pixels around: outside the picture is blank paper
    padded[:, 2:30, 2:30] = pictures
    from_x = np.clip(from_x + 2, 0, 30.999)
    from_y = np.clip(from_y + 2, 0, 30.999)
    left, top = from_x.astype(np.int64), from_y.astype(np.int64)
    dx, dy = (from_x - left).astype(np.float32), (from_y - top).astype(np.float32)
    who = np.arange(n)[:, None, None]
    upper = padded[who, top, left] * (1 - dx) + padded[who, top, left + 1] * dx
    lower = padded[who, top + 1, left] * (1 - dx) + padded[who, top + 1, left + 1] * dx
    out = (upper * (1 - dy) + lower * dy) / np.float32(255)

    floor = (rng.random((n, 1, 1)) * 0.3).astype(np.float32)  # thinner or thicker, softer or harder strokes
    gain = (0.8 + rng.random((n, 1, 1)) * 1.7).astype(np.float32)
    noise = (rng.random(out.shape) * 0.1 - 0.05).astype(np.float32)
    return np.clip((out - floor) * gain + noise, 0, 1)


# --- network (float32, NHWC, one matrix product per layer) -----------------------------------------------------------


def init(rng):
    def uniform(inputs, outputs):
        bound = math.sqrt(6 / inputs)
        return (rng.random((inputs, outputs)) * 2 * bound - bound).astype(np.float32)

    shapes = [(25, 6), (150, 16), (400, 120), (120, 84), (84, 10)]
    return [part for i, o in shapes for part in (uniform(i, o), np.zeros(o, np.float32))]


def windows(x):
    """(n,h,w,c) -> (n,h-4,w-4,25*c): every 5x5 window, tap-major."""
    view = np.lib.stride_tricks.sliding_window_view(x, (5, 5), axis=(1, 2))
    n, h, w = view.shape[:3]
    return np.ascontiguousarray(view.transpose(0, 1, 2, 4, 5, 3)).reshape(n, h, w, -1)


def pool(x):
    n, h, w, c = x.shape
    quads = x.reshape(n, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(n, h // 2, w // 2, 4, c)
    which = quads.argmax(axis=3)[:, :, :, None]
    return np.take_along_axis(quads, which, axis=3)[:, :, :, 0], which


def unpool(grad, which):
    n, h, w, c = grad.shape
    quads = np.zeros((n, h, w, 4, c), np.float32)
    np.put_along_axis(quads, which, grad[:, :, :, None], axis=3)
    return quads.reshape(n, h, w, 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(n, 2 * h, 2 * w, c)


def forward(p, x):
    """float32 (n,28,28) in 0..1 -> logits and what the backward pass needs."""
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2)))[..., None]
    w1 = windows(padded)
    a1, m1 = pool(w1 @ p[0] + p[1])
    r1 = np.maximum(a1, 0)
    w2 = windows(r1)
    a2, m2 = pool(w2 @ p[2] + p[3])
    r2 = np.maximum(a2, 0).reshape(len(x), 400)
    h1 = np.maximum(r2 @ p[4] + p[5], 0)
    h2 = np.maximum(h1 @ p[6] + p[7], 0)
    return h2 @ p[8] + p[9], (w1, m1, r1, w2, m2, r2, h1, h2)


def backward(p, saved, grad):
    w1, m1, r1, w2, m2, r2, h1, h2 = saved
    n = len(grad)
    grads = [None] * 10
    for layer, inputs in ((8, h2), (6, h1), (4, r2)):
        grads[layer], grads[layer + 1] = inputs.T @ grad, grad.sum(axis=0)
        grad = (grad @ p[layer].T) * (inputs > 0)
    grad = unpool(grad.reshape(n, 5, 5, 16), m2)
    flat = grad.reshape(-1, 16)
    grads[2], grads[3] = w2.reshape(-1, 150).T @ flat, flat.sum(axis=0)
    taps = (flat @ p[2].T).reshape(n, 10, 10, 5, 5, 6)
    back = np.zeros_like(r1)
    for ky in range(5):
        for kx in range(5):
            back[:, ky : ky + 10, kx : kx + 10] += taps[:, :, :, ky, kx]
    flat = unpool(back * (r1 > 0), m1).reshape(-1, 6)
    grads[0], grads[1] = w1.reshape(-1, 25).T @ flat, flat.sum(axis=0)
    return grads


def softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    exps = np.array([math.exp(v) for v in shifted.ravel().tolist()]).reshape(shifted.shape)
    return exps / exps.sum(axis=1, keepdims=True)


def train(pictures, labels, rng, epochs):
    """AdamW with a warm-up and a cosine schedule; cross entropy with a little label smoothing."""
    p = init(rng)
    first = [np.zeros_like(w) for w in p]
    second = [np.zeros_like(w) for w in p]
    batches = len(pictures) // BATCH
    total, step = epochs * batches, 0
    for epoch in range(epochs):
        order, loss = rng.permutation(len(pictures)), 0.0
        for b in range(batches):
            pick = order[b * BATCH : (b + 1) * BATCH]
            logits, saved = forward(p, augment(pictures[pick], rng))
            chances = softmax(logits)
            target = np.full((BATCH, 10), 0.02 / 9)
            target[np.arange(BATCH), labels[pick]] = 0.98
            loss -= math.fsum(math.log(c) for c in chances[np.arange(BATCH), labels[pick]].tolist()) / BATCH
            grads = backward(p, saved, ((chances - target) / BATCH).astype(np.float32))
            step += 1
            rate = PEAK_RATE * min(step / 200, 0.5 + 0.5 * math.cos(math.pi * step / total))
            for i, g in enumerate(grads):
                first[i] += np.float32(0.1) * (g - first[i])
                second[i] += np.float32(0.001) * (g * g - second[i])
                move = first[i] / np.float32(1 - 0.9**step)
                move = move / (np.sqrt(second[i] / np.float32(1 - 0.999**step)) + np.float32(1e-8))
                p[i] -= np.float32(rate) * (move + np.float32(DECAY if i % 2 == 0 else 0) * p[i])
        if epoch % 20 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch + 1}/{epochs}: mean loss {loss / batches:.4f}", flush=True)
    return p


# --- float64 reference: plain definitions, nothing shared with the network above or the C++ ----------------------------


def reference(p, picture):
    """Logits of one u8 28x28 picture in float64, straight from the layer definitions."""
    conv1 = p[0].astype(np.float64).reshape(5, 5, 6)
    conv2 = p[2].astype(np.float64).reshape(5, 5, 6, 16)
    padded = np.zeros((32, 32))
    padded[2:30, 2:30] = picture / 255.0
    map1 = np.zeros((14, 14, 6))
    for y in range(14):
        for x in range(14):
            quad = [
                np.tensordot(padded[2 * y + i : 2 * y + i + 5, 2 * x + j : 2 * x + j + 5], conv1, 2)
                for i in (0, 1)
                for j in (0, 1)
            ]
            map1[y, x] = np.maximum(np.max(quad, axis=0) + p[1], 0)
    map2 = np.zeros((5, 5, 16))
    for y in range(5):
        for x in range(5):
            quad = [
                np.tensordot(map1[2 * y + i : 2 * y + i + 5, 2 * x + j : 2 * x + j + 5], conv2, 3)
                for i in (0, 1)
                for j in (0, 1)
            ]
            map2[y, x] = np.maximum(np.max(quad, axis=0) + p[3], 0)
    hidden = np.maximum(map2.reshape(400) @ p[4].astype(np.float64) + p[5], 0)
    hidden = np.maximum(hidden @ p[6].astype(np.float64) + p[7], 0)
    return hidden @ p[8].astype(np.float64) + p[9]


# --- files ------------------------------------------------------------------------------------------------------------


def printed(value):
    """Shortest of five significant digits, as a C literal without a suffix (the compiler rounds it to float)."""
    text = f"{value:.5g}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def as_printed(p):
    """The weights exactly as the header carries them: five significant digits, rounded to float32."""
    return [np.array([float(f"{v:.5g}") for v in w.ravel().tolist()], np.float32).reshape(w.shape) for w in p]


def write_weights(path, p, note):
    pad = lambda a, columns: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, columns - a.shape[-1])])
    conv2 = p[2].reshape(5, 5, 6, 16).transpose(2, 0, 1, 3).reshape(150, 16)
    tables = [
        ("CONV1", "[ky * 5 + kx][channel]", p[0]),
        ("CONV1_BIAS", "[channel]", p[1]),
        ("CONV2", "[(input * 5 + ky) * 5 + kx][channel]", conv2),
        ("CONV2_BIAS", "[channel]", p[3]),
        ("FC1", "[(y * 5 + x) * 16 + channel][output], outputs 120..127 are padding", pad(p[4], 128)),
        ("FC1_BIAS", "[output]", pad(p[5], 128)),
        ("FC2", "[input][output], outputs 84..95 are padding", pad(p[6], 96)),
        ("FC2_BIAS", "[output]", pad(p[7], 96)),
        ("FC3", "[input][output], outputs 10..15 are padding", pad(p[8], 16)),
        ("FC3_BIAS", "[output]", pad(p[9], 16)),
    ]
    lines = ["// Weights of the built-in LeNet-5. Written by tools/train/train_lenet.py; do not edit.", "//"]
    lines += [f"// {line}" for line in note]
    lines += [
        "#ifndef SERVAL_MODELS_LENET_WEIGHTS_H",
        "#define SERVAL_MODELS_LENET_WEIGHTS_H",
        "",
        "#ifdef __CUDACC__",
        "#define SERVAL_LENET_TABLE static __device__ const",
        "#else",
        "#define SERVAL_LENET_TABLE inline constexpr",
        "#endif",
        "",
        "namespace serval_lenet::weights {",
    ]
    for name, order, table in tables:
        shape = "".join(f"[{n}]" for n in table.shape)
        lines += ["", f"// {order}", f"alignas(64) SERVAL_LENET_TABLE float {name}{shape} = {{"]
        for row in table.reshape(-1, table.shape[-1]):
            text = ",".join(printed(v) for v in row.tolist())
            lines.append(f"{{{text}}}," if table.ndim == 2 else text)
        lines.append("};")
    lines += ["", "}  // namespace serval_lenet::weights", "", "#undef SERVAL_LENET_TABLE", "#endif", ""]
    path.write_text("\n".join(lines))


def write_digits(path, pictures, labels):
    with open(path, "wb") as file:
        file.write(b"SVDIGIT1" + struct.pack("<I", len(labels)))
        for picture, label in zip(pictures, labels):
            file.write(bytes([label]) + picture.tobytes())


def golden_pictures(held, rng):
    """Held-out digits and unusual pictures: empty, full, noise, stripes, single pixels at every edge."""
    odd = [np.zeros((28, 28), np.uint8), np.full((28, 28), 255, np.uint8)]
    odd += [rng.integers(0, 256, (28, 28)).astype(np.uint8) for _ in range(8)]
    y, x = np.indices((28, 28))
    odd += [((axis % 2) * 255).astype(np.uint8) for axis in (x, y, x + y)]
    for corner in ((0, 0), (0, 27), (27, 0), (27, 27), (13, 27), (27, 13)):
        dot = np.zeros((28, 28), np.uint8)
        dot[corner] = 255
        odd.append(dot)
    return list(held[:45]) + odd


def write_golden(path, p, pictures):
    with open(path, "wb") as file:
        file.write(b"SVLENET1" + struct.pack("<I", len(pictures)))
        for picture in pictures:
            file.write(picture.tobytes() + struct.pack("<10d", *reference(p, picture)))


def accuracy(p, pictures, labels):
    right = 0
    for at in range(0, len(labels), 500):
        part = pictures[at : at + 500].astype(np.float32) / np.float32(255)
        right += int((forward(p, part)[0].argmax(axis=1) == labels[at : at + 500]).sum())
    return right, len(labels)


def main():
    parser = argparse.ArgumentParser(description="Train the built-in LeNet-5 and write device/models/lenet_*.")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="folder with the four MNIST IDX files")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=MODELS, metavar="DIR")
    args = parser.parse_args()

    rng = np.random.Generator(np.random.PCG64(SEED))
    pictures, labels = scanned_digits()
    learn, held = split(labels, rng)
    train_pictures, train_labels = pictures[learn], labels[learn]
    source = f"{len(learn)} scanned digits (UCI Optical Recognition of Handwritten Digits, CC BY 4.0)"
    if args.mnist:
        mnist_pictures = read_idx(args.mnist, "train-images-idx3-ubyte")
        train_pictures = np.concatenate([train_pictures, mnist_pictures])
        train_labels = np.concatenate([train_labels, read_idx(args.mnist, "train-labels-idx1-ubyte")])
        source += f" and {len(mnist_pictures)} of MNIST"

    p = as_printed(train(train_pictures, train_labels, rng, args.epochs))
    right, of = accuracy(p, pictures[held], labels[held])
    note = [
        f"Trained on {source},",
        f"seed {SEED}, {args.epochs} epochs, numpy {np.__version__}.",
        f"Held out: {right} of {of} digits right ({100 * right / of:.2f} %).",
    ]
    if args.mnist:
        mnist = accuracy(p, read_idx(args.mnist, "t10k-images-idx3-ubyte"), read_idx(args.mnist, "t10k-labels-idx1-ubyte"))
        note.append(f"MNIST test: {mnist[0]} of {mnist[1]} digits right ({100 * mnist[0] / mnist[1]:.2f} %).")
    print("\n".join(note))
    write_weights(args.out / "lenet_weights.h", p, note)
    write_digits(args.out / "digits_heldout.bin", pictures[held], labels[held])
    write_golden(args.out / "lenet_golden.bin", p, golden_pictures(pictures[held], rng))


if __name__ == "__main__":
    main()
