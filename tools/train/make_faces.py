#!/usr/bin/env python3
"""Writes the pictures of the face verification demo and the golden vectors of device/models/faces.h.

    /tmp/venv-train/bin/python tools/train/make_faces.py              # committed files, synthetic faces
    /tmp/venv-train/bin/python tools/train/make_faces.py --lfw FILE   # FILE from real photographs, for your own use

Committed (formats: device/models/README.md):

    device/models/faces_demo.bin     100 labelled synthetic faces, each with a second, noisy picture of the same face
    device/models/faces_golden.bin   pairs of pictures, their codes and distances from the float64 reference below

Why synthetic. The small set of face photographs that Python packages ship (skimage.data.lfw_subset, 100 crops of
Labeled Faces in the Wild) comes from news photographs of identifiable people; neither the data set nor the package
states a licence for the pictures. Serval therefore ships none of them. --lfw reads them from an installed scikit-image
and writes a file of the same format that you can hand to the demo instead.

A synthetic face is drawn from some thirty random numbers: head, hair, brows, eyes, nose, mouth and beard at 32x32 with
side light, plus skin texture that belongs to the person. It makes no claim about faces; it gives the demo pictures that
look like what they stand for and that verify with plausible errors.
"""

import argparse
import math
import struct
from pathlib import Path

import numpy as np

MODELS = Path(__file__).resolve().parents[2] / "device" / "models"
SEED = 2006
PEOPLE = 100
NOISE = 2.0  # grey levels, standard deviation, of the second picture in the files
THRESHOLD = 800.0  # DEFAULT_THRESHOLD of device/models/faces.h

# --- float64 reference: the definitions in device/models/faces.h, written independently of the C++ ----------------------

CLOCKWISE = [(-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1)]  # (dy, dx) of bits 0..7


def codes(picture):
    around = np.pad(picture, 1, mode="edge")
    code = np.zeros((32, 32), np.uint8)
    for bit, (dy, dx) in enumerate(CLOCKWISE):
        code += (around[1 + dy : 33 + dy, 1 + dx : 33 + dx] >= picture).astype(np.uint8) << bit
    return code


def histograms(picture):
    cells = codes(picture).reshape(4, 8, 4, 8).transpose(0, 2, 1, 3).reshape(16, 64)
    return np.stack([np.bincount(cell, minlength=256) for cell in cells]).astype(np.float64)


def chi_square(p, s):
    total = p + s
    return float((((p - s) ** 2)[total > 0] / total[total > 0]).sum())


def distance(probe, stored):
    return chi_square(histograms(probe), histograms(stored))


# --- pictures ---------------------------------------------------------------------------------------------------------


def noise(rng, shape, deviation):
    """Close to normal, from uniforms only (so that the bytes do not depend on a maths library)."""
    return (rng.random((4, *shape)).sum(axis=0) - 2) * (deviation * math.sqrt(3))


def soft(value):
    """Smooth step: 0 below -1, 1 above 1."""
    t = np.clip(value * 0.5 + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


def upsample(grid, side):
    """Bilinear, pixel centres, edges clamped."""
    at = (np.arange(side) + 0.5) * grid.shape[0] / side - 0.5
    base = np.clip(np.floor(at).astype(int), 0, grid.shape[0] - 2)
    part = np.clip(at - base, 0, 1)
    rows = grid[base] * (1 - part)[:, None] + grid[base + 1] * part[:, None]
    return rows[:, base] * (1 - part) + rows[:, base + 1] * part


def synthetic_face(rng):
    """One person, as 32x32 floats around 0..255."""
    r = lambda low, high: low + (high - low) * rng.random()
    y, x = (np.indices((32, 32)) - 15.5) / 16
    x = x + r(-0.06, 0.06)
    face = np.full((32, 32), r(20, 200)) + 40 * r(-1, 1) * x

    def blend(mask, grey):
        nonlocal face
        face = face * (1 - mask) + grey * mask

    wide, tall, jaw = r(0.62, 0.8), r(0.85, 1.0), r(-0.2, 0.25)
    skin = r(110, 210)
    head = soft((1 - (x / (wide * (1 - jaw * np.maximum(y, 0)))) ** 2 - ((y - 0.05) / tall) ** 2) * 4)
    shade = skin * (1 + r(-0.35, 0.35) * x - 0.25 * (x / wide) ** 2 - r(0, 0.15) * y)
    blend(head, shade)
    hair, line = r(10, 120), r(-0.75, -0.4)
    blend(head * soft((line + r(-0.2, 0.2) * x + r(-0.3, 0.5) * x * x - y) * 10), hair)

    gap, eye_y, eye_w, eye_h = r(0.25, 0.36), r(-0.22, -0.08), r(0.11, 0.17), r(0.05, 0.1)
    brow_y, brow_h, tilt = eye_y - r(0.14, 0.22), r(0.03, 0.07), r(-0.25, 0.25)
    iris, white = r(10, 70), skin * r(1.0, 1.25)
    for side in (-1, 1):
        dx = x - side * gap
        blend(soft((1 - (dx / (eye_w * 1.5)) ** 2 - ((y - eye_y) / (eye_h * 2.2)) ** 2) * 1.5) * 0.5, skin * r(0.55, 0.85))
        blend(soft((1 - (dx / eye_w) ** 2 - ((y - eye_y) / eye_h) ** 2) * 2), white)
        blend(soft((1 - ((dx - 0.02) / 0.07) ** 2 - ((y - eye_y) / 0.07) ** 2) * 2), iris)
        lean = y - brow_y - side * tilt * dx
        blend(soft((1 - (dx / (eye_w * 1.5)) ** 2 - (lean / brow_h) ** 2) * 2) * r(0.5, 1), hair)
    nose_y, nose_w = r(0.16, 0.28), r(0.1, 0.18)
    blend(soft((1 - (x / nose_w) ** 2 - ((y - nose_y) / 0.05) ** 2) * 2) * r(0.3, 0.7), skin * 0.6)
    blend(soft((1 - ((x - r(0.02, 0.06)) / 0.05) ** 2 - ((y - 0.03) / 0.2) ** 2) * 2) * 0.4, skin * 1.2)
    mouth_y, mouth_w, mouth_h, smile = r(0.42, 0.56), r(0.2, 0.34), r(0.04, 0.09), r(-0.4, 0.6)
    bow = y - mouth_y + smile * x * x
    blend(soft((1 - (x / mouth_w) ** 2 - (bow / mouth_h) ** 2) * 2), skin * r(0.45, 0.75))
    if r(0, 1) < 0.3:
        blend(head * soft((y - r(0.3, 0.5)) * 6) * r(0.2, 0.7), hair)
    if r(0, 1) < 0.25:
        for side in (-1, 1):
            ring = ((x - side * gap) / (eye_w * 1.6)) ** 2 + ((y - eye_y) / (eye_h * 2.5)) ** 2
            blend(soft((0.25 - abs(ring - 1)) * 6), 40)
    texture = upsample(rng.random((6, 6)) - 0.5, 32) * 40 + upsample(rng.random((16, 16)) - 0.5, 32) * 60
    return face + texture


def lfw_faces():
    """The 100 face crops that scikit-image ships, 25x25, bilinearly to 32x32."""
    from skimage.data import lfw_subset

    return [upsample(crop.astype(np.float64) * 255 / max(crop.max(), 1), 32) for crop in lfw_subset()[:100]]


def as_bytes(picture):
    return np.floor(np.clip(picture, 0, 255) + 0.5).astype(np.uint8)


def second_picture(rng, picture, deviation):
    """The same face under another light, seen by a noisy sensor."""
    gain, offset = 0.85 + 0.3 * rng.random(), 30 * rng.random() - 15
    return as_bytes((picture.astype(np.float64) - 128) * gain + 128 + offset + noise(rng, (32, 32), deviation))


# --- error rates ------------------------------------------------------------------------------------------------------


def error_rates(name, faces, rng):
    """Lines of text: the distances of true and false pairs, and the errors at THRESHOLD."""
    stored = [as_bytes(face) for face in faces]
    described = [histograms(picture) for picture in stored]
    false = np.array([chi_square(described[i], described[j]) for i in range(len(faces)) for j in range(i)])
    lines = [f"{name}: {len(false)} false pairs, distance {false.min():.0f}..{false.max():.0f} (median {np.median(false):.0f}), "
             f"{100 * (false <= THRESHOLD).mean():.2f} % accepted at {THRESHOLD:.0f}"]
    for deviation in (1.0, 2.0, 3.0, 5.0, 8.0):
        pairs = [(second_picture(rng, face, deviation), i) for i, face in enumerate(stored) for _ in range(10)]
        true = np.array([chi_square(histograms(probe), described[i]) for probe, i in pairs])
        lines.append(f"{name}: {len(true)} true pairs with noise {deviation:.0f}, distance {true.min():.0f}..{true.max():.0f} "
                     f"(median {np.median(true):.0f}), {100 * (true > THRESHOLD).mean():.2f} % rejected")
    return lines


# --- files ------------------------------------------------------------------------------------------------------------


def write_faces(path, faces, rng, note):
    text = "\n".join(note).encode() + b"\n"
    with open(path, "wb") as file:
        file.write(b"SVFACES1" + struct.pack("<II", len(faces), len(text)) + text)
        for face in faces:
            stored = as_bytes(face)
            label = rng.integers(0, 256, 12).astype(np.uint8)
            file.write(label.tobytes() + stored.tobytes() + second_picture(rng, stored, NOISE).tobytes())


def golden_pairs(faces, rng):
    picture = [as_bytes(face) for face in faces]
    flat, full = np.full((32, 32), 77, np.uint8), np.full((32, 32), 255, np.uint8)
    y, x = np.indices((32, 32))
    ramp, steps = (x * 8).astype(np.uint8), ((y // 3 * 20 + x // 5) % 256).astype(np.uint8)
    board = ((x + y) % 2 * 255).astype(np.uint8)
    random = [rng.integers(0, high, (32, 32)).astype(np.uint8) for high in (256, 256, 2, 2, 4, 256)]
    pairs = [(second_picture(rng, picture[i], NOISE), picture[i]) for i in range(6)]
    pairs += [(picture[i], picture[i + 1]) for i in range(6)]
    pairs += [(picture[0], picture[0]), (flat, flat), (flat, full), (flat, board), (board, 255 - board), (ramp, 255 - ramp)]
    pairs += [(ramp, steps), (steps, steps.T), (picture[1], flat), (random[0], random[1]), (random[2], random[3])]
    pairs += [(random[4], flat), (random[5], picture[2])]
    return pairs


def write_golden(path, pairs):
    with open(path, "wb") as file:
        file.write(b"SVLBPCHI" + struct.pack("<I", len(pairs)))
        for probe, stored in pairs:
            file.write(probe.tobytes() + stored.tobytes() + codes(probe).tobytes() + struct.pack("<d", distance(probe, stored)))


def main():
    parser = argparse.ArgumentParser(description="Write the pictures of the face verification demo.")
    parser.add_argument("--lfw", type=Path, metavar="FILE", help="write only FILE, from the photographs that scikit-image ships")
    parser.add_argument("--out", type=Path, default=MODELS, metavar="DIR")
    args = parser.parse_args()
    rng = np.random.Generator(np.random.PCG64(SEED))
    if args.lfw:
        faces = lfw_faces()
        note = ["Labeled Faces in the Wild, scikit-image subset; not for redistribution."] + error_rates("lfw", faces, rng)
        write_faces(args.lfw, faces, rng, note)
    else:
        faces = [synthetic_face(rng) for _ in range(PEOPLE)]
        note = [f"Synthetic faces, tools/train/make_faces.py, seed {SEED}; second pictures with noise {NOISE:.0f}."]
        note += error_rates("synthetic", faces, rng)
        write_faces(args.out / "faces_demo.bin", faces, rng, note)
        write_golden(args.out / "faces_golden.bin", golden_pairs(faces, rng))
    print("\n".join(note))


if __name__ == "__main__":
    main()
