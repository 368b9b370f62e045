# SPDX-License-Identifier: Apache-2.0
"""Synthetic world of klein-mini: scenes of coloured shapes, their renderer, captions and edits.

Everything is drawn from a seeded numpy generator; nothing is read from disk.
"""
import math
import numpy as np, torch

SHAPES = ["circle", "square", "triangle", "ring", "star", "cross", "diamond"]
SHAPE_WORDS = [["circle", "circle", "disc", "dot", "ball"], ["square", "square", "box"], ["triangle"],
               ["ring", "ring", "donut", "hoop"], ["star"], ["cross", "cross", "plus sign", "plus"], ["diamond", "diamond", "rhombus"]]
COLORS = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "black", "white", "gray"]
COLOR_WORDS = [["red"], ["orange"], ["yellow"], ["green"], ["cyan", "cyan", "turquoise"], ["blue"], ["purple", "purple", "violet"],
               ["pink"], ["black"], ["white"], ["gray", "grey"]]
RGB = np.array([[220, 40, 40], [245, 140, 30], [245, 220, 50], [40, 165, 70], [60, 205, 215], [40, 80, 215], [130, 55, 170],
                [245, 140, 185], [25, 25, 30], [245, 245, 245], [135, 135, 140]], np.float32) / 255
SIZES = ["small", "medium", "large"]
SIZE_WORDS = [["small", "small", "tiny", "little"], ["", "", "", "medium", "medium-sized"], ["large", "big", "big", "huge"]]
RADIUS = [0.12, 0.19, 0.28]
CENTRE = .4             # share of single objects in the centre, beside an even draw of all nine places
POS = ["top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right"]
POS_WORDS = [["in the top left corner", "at the top left", "in the upper left"], ["at the top", "on top", "in the upper part"],
             ["in the top right corner", "at the top right", "in the upper right"],
             ["on the left", "at the left", "on the left side", "to the left"],
             ["in the centre", "in the center", "in the middle", "", "", "", ""],
             ["on the right", "at the right", "on the right side", "to the right"],
             ["in the bottom left corner", "at the bottom left", "in the lower left"], ["at the bottom", "in the lower part"],
             ["in the bottom right corner", "at the bottom right", "in the lower right"]]
TASKS = ["t2i", "recolour", "background", "move", "reshape", "resize", "recolour+background", "shape+colour", "side by side", "three"]
# fields of the parse that the text encoder learns; class 0 means "not said"
FIELDS = {"task": len(TASKS), "s1": 8, "c1": 12, "z1": 4, "p1": 10, "s2": 8, "c2": 12, "bgt": 5, "b1": 12, "b2": 12, "rel": 3}
NU = 8                  # free numbers of a scene: dx, dy, size, turn for each of two objects
TURN = [0, 25, 18, 0, 18, 20, 9]


def dit_world():
    """The world that the DiT was last trained on: slightly larger objects, more of them in the centre (the VAE and the text encoder saw the values above)."""
    global RADIUS, CENTRE
    RADIUS, CENTRE = [0.13, 0.21, 0.31], .5


class Scene:
    """objs: list of [shape, colour, size, position]; bg: (kind, c1, c2), kind 0 plain, 1 left/right, 2 top/bottom, 3 gradient."""
    def __init__(s, objs, bg, u, rel=0):
        s.objs, s.bg, s.u, s.rel = objs, bg, u, rel

    def copy(s):
        return Scene([list(o) for o in s.objs], tuple(s.bg), s.u.copy(), s.rel)


def sample_scene(r, two=0.25):
    u = r.random(NU)
    n = 2 if r.random() < two else 1
    kind = int(r.choice(4, p=[.7, .08, .08, .14]))
    b1 = int(r.integers(11)); b2 = int(r.choice([c for c in range(11) if c != b1])) if kind else b1
    if kind == 0 and r.random() < .25:
        b1 = b2 = 9
    free = [c for c in range(11) if c not in (b1, b2)]
    objs = []
    shapes = r.permutation(7)[:2]
    cols = r.permutation(free)[:2]
    for i in range(n):
        z = int(r.choice(3, p=[.25, .5, .25])) if n == 1 else int(r.choice(2, p=[.3, .7]))
        p = (4 if r.random() < CENTRE else int(r.integers(9))) if n == 1 else 4
        objs.append([int(shapes[i]), int(cols[i]), z, p])
    return Scene(objs, (kind, b1, b2), u, int(r.random() < .25) if n == 2 else 0)


def geometry(s, W, H):
    """-> list of (shape, colour, cx, cy, radius, angle) in pixels."""
    m, out = min(W, H), []
    for i, (sh, co, z, p) in enumerate(s.objs):
        du = s.u[4 * i:4 * i + 4]
        ax, ay = (.25, .5, .75)[p % 3], (.25, .5, .75)[p // 3]
        k = .16
        if len(s.objs) == 2:
            k = .09
            if s.rel == 0: ax, ay = (.27, .73)[i], .5
            else: ax, ay = .5, (.27, .73)[i]
        r = RADIUS[z] * m * (.86 + .28 * du[2])
        cx = W * ax + (du[0] - .5) * k * m; cy = H * ay + (du[1] - .5) * k * m
        cx = min(max(cx, 1.06 * r), W - 1.06 * r); cy = min(max(cy, 1.06 * r), H - 1.06 * r)
        out.append((sh, co, cx, cy, r, math.radians((2 * du[3] - 1) * TURN[sh])))
    return out


def render(scenes, W, H, box=None):
    """float32 [N,3,H,W] in -1..1. box (x0,y0,w,h) renders a crop only."""
    x0, y0, w, h = box or (0, 0, W, H)
    N = len(scenes)
    X = (torch.arange(w, dtype=torch.float32) + .5 + x0)[None, None, :]; Y = (torch.arange(h, dtype=torch.float32) + .5 + y0)[None, :, None]
    rgb = torch.from_numpy(RGB)
    c1 = rgb[[s.bg[1] for s in scenes]][:, :, None, None]; c2 = rgb[[s.bg[2] for s in scenes]][:, :, None, None]
    kind = torch.tensor([s.bg[0] for s in scenes])[:, None, None]
    zero = torch.zeros(N, h, w)
    t = torch.where(kind == 1, (X - W / 2 + .5).clamp(0, 1) + zero, torch.where(kind == 2, (Y - H / 2 + .5).clamp(0, 1) + zero,
                    torch.where(kind == 3, Y / H + zero, zero)))[:, None]
    img = c1 + (c2 - c1) * t
    for i in range(2):
        idx = [j for j, s in enumerate(scenes) if len(s.objs) > i]
        if not idx: continue
        G = [geometry(scenes[j], W, H)[i] for j in idx]
        v = lambda k: torch.tensor([g[k] for g in G], dtype=torch.float32)[:, None, None]
        dx, dy, r, a = X - v(2), Y - v(3), v(4), v(5)
        px, py = dx * a.cos() + dy * a.sin(), -dx * a.sin() + dy * a.cos()
        rr = (px * px + py * py).sqrt(); ax, ay = px.abs(), py.abs()
        d = torch.empty_like(px)
        for sh in set(g[0] for g in G):
            q = torch.tensor([k for k, g in enumerate(G) if g[0] == sh])
            R, x, y, xa, ya, rq = r[q], px[q], py[q], ax[q], ay[q], rr[q]
            if sh == 0: e = rq - .95 * R
            elif sh == 1: e = torch.maximum(xa, ya) - .82 * R
            elif sh == 2: e = torch.maximum(.866 * xa - .5 * (y + .12 * R), y + .12 * R) - .55 * R
            elif sh == 3: e = (rq - .72 * R).abs() - .24 * R
            elif sh == 4:
                th = torch.atan2(x, -y); f = 2 * math.pi / 5
                th = (th - f * torch.round(th / f)).abs(); fx, fy = rq * th.cos(), rq * th.sin()
                ix, iy = .45 * math.cos(f / 2), .45 * math.sin(f / 2); nx, ny = iy, 1.05 - ix; l = math.hypot(nx, ny)
                e = ((fx - 1.05 * R) * nx + fy * ny) / l
            elif sh == 5: e = torch.minimum(torch.maximum(xa - .95 * R, ya - .33 * R), torch.maximum(xa - .33 * R, ya - .95 * R))
            else: e = (xa / .62 + ya - R) * (.62 / math.hypot(1, .62))
            d[q] = e
        cov = (.5 - d).clamp(0, 1)[:, None]
        ii = torch.tensor(idx)
        img[ii] = img[ii] + (rgb[[g[1] for g in G]][:, :, None, None] - img[ii]) * cov
    return img * 2 - 1


# ---------------------------------------------------------------- captions
def pick(r, l): return l[int(r.integers(len(l)))]


def art(w): return ("an " if w[0] in "aeiou" else "a ") + w


def obj_phrase(r, o, the=False):
    sh, co, z = pick(r, SHAPE_WORDS[o[0]]), pick(r, COLOR_WORDS[o[1]]), pick(r, SIZE_WORDS[o[2]])
    k = r.random()
    sp = lambda *w: " ".join(x for x in w if x)
    if k < .72: return art(sp(z, co, sh))
    if k < .80: return art(sp(z, sh)) + " in " + co
    if k < .88: return art(sp(co, sh)) if not z else art(z + ", " + co + " " + sh)
    if k < .94: return sp("one", z, co, sh)
    return sp(z, co, sh)


def bg_phrase(r, bg):
    a, b = pick(r, COLOR_WORDS[bg[1]]), pick(r, COLOR_WORDS[bg[2]])
    if bg[0] == 0: return pick(r, [f"on {art(a)} background", f"on {art(a)} background", f"{a} background", f"against {art(a)} background",
                                   f"with {art(a)} background", f"over {art(a)} backdrop", f"on {a}", f"the background is {a}", f"on a plain {a} background"])
    if bg[0] == 1: return pick(r, [f"on a background that is {a} on the left and {b} on the right", f"left half {a}, right half {b} background",
                                   f"on a two-tone background, {a} left and {b} right", f"on a background split into {a} and {b}"])
    if bg[0] == 2: return pick(r, [f"on a background that is {a} at the top and {b} at the bottom", f"top half {a}, bottom half {b} background",
                                   f"on a two-tone background, {a} above and {b} below"])
    return pick(r, [f"on a gradient from {a} to {b}", f"on {art(a)} to {b} gradient", f"with a background fading from {a} to {b}",
                    f"on {art(a)} to {b} gradient background"])


LEAD = ["", "", "", "", "", "", "draw ", "a picture of ", "an image of ", "a flat illustration of ", "a poster with ", "please draw ", "there is ",
        "simple drawing of ", "show me "]


def finish(r, t):
    if r.random() < .25: t = t[0].upper() + t[1:]
    if r.random() < .15: t += "."
    return t


def caption(r, s):
    """-> text, parse dict"""
    f = dict.fromkeys(FIELDS, 0)
    white = s.bg[0] == 0 and s.bg[1] == 9 and r.random() < .4          # unsaid background = white
    bg = "" if white else bg_phrase(r, s.bg)
    f["bgt"] = s.bg[0] + 1; f["b1"] = s.bg[1] + 1; f["b2"] = s.bg[2] + 1
    o = s.objs[0]
    black = len(s.objs) == 1 and o[1] == 8 and r.random() < .2         # unsaid colour = black
    f["s1"], f["c1"], f["z1"] = o[0] + 1, o[1] + 1, o[2] + 1
    if len(s.objs) == 1:
        ph = obj_phrase(r, o) if not black else art(" ".join(x for x in (pick(r, SIZE_WORDS[o[2]]), pick(r, SHAPE_WORDS[o[0]])) if x))
        pw = pick(r, POS_WORDS[o[3]]); f["p1"] = o[3] + 1
        k = r.random()
        if k < .45: parts = [ph, pw, bg]; sep = " "
        elif k < .7: parts = [ph, pw, bg]; sep = ", "
        elif k < .85: parts = [ph, bg, pw]; sep = " "
        else: parts = [bg, ph + (" " + pw if pw else "")]; sep = ", "
        t = sep.join(p for p in parts if p)
    else:
        q = s.objs[1]; f["s2"], f["c2"], f["rel"] = q[0] + 1, q[1] + 1, s.rel + 1
        A, B = obj_phrase(r, o), obj_phrase(r, q)
        if s.rel == 0: ph = pick(r, [f"{A} and {B}", f"{A} and {B}", f"{A} next to {B}", f"{A} on the left and {B} on the right", f"{A}, {B}",
                                     f"{A} to the left of {B}", f"{A} beside {B}"])
        else: ph = pick(r, [f"{A} above {B}", f"{A} over {B}", f"{A} at the top and {B} at the bottom"])
        if r.random() < .12:
            ph = f"{B} to the right of {A}" if s.rel == 0 else f"{B} below {A}"
        t = (ph + pick(r, [" ", ", "]) + bg if r.random() < .85 else bg + ", " + ph) if bg else ph
    return finish(r, (pick(r, LEAD) + t).strip()), f


def edit(r, s):
    """-> target scene, text, parse. The target keeps the source's free numbers."""
    f = dict.fromkeys(FIELDS, 0); t = s.copy()
    one = len(s.objs) == 1
    task = int(r.choice([1, 2, 3, 4, 5, 6], p=[.32, .24, .16, .12, .08, .08])) if one else int(r.choice([1, 2, 4], p=[.5, .3, .2]))
    f["task"] = task
    i = int(r.integers(len(s.objs))); o = t.objs[i]
    used = {x[1] for x in s.objs} | {s.bg[1], s.bg[2]}
    newc = int(r.choice([c for c in range(11) if c not in used])); cw = pick(r, COLOR_WORDS[newc])
    name = "the " + pick(r, SHAPE_WORDS[o[0]])
    f["s1"] = o[0] + 1
    if one and r.random() < .15: name = pick(r, ["it", "the shape", "the object"]); f["s1"] = 0
    sub = pick(r, [name, "its"]) if False else name
    if task == 1 or task == 6:
        o[1] = newc; f["c1"] = newc + 1
        ps = name + "'s" if name != "it" else "its"
        x = pick(r, [f"make {name} {cw}", f"make {name} {cw}", f"turn {name} {cw}", f"change {name} to {cw}", f"paint {name} {cw}", f"colour {name} {cw}",
                     f"{name} should be {cw}", f"change the colour of {name} to {cw}", f"change {ps} color to {cw}", f"recolour {name} in {cw}"])
    if task == 2 or task == 6:
        b = int(r.choice([c for c in range(11) if c not in used | {newc}])); bw = pick(r, COLOR_WORDS[b])
        t.bg = (0, b, b); f["b1"] = b + 1
        y = pick(r, [f"change the background to {bw}", f"make the background {bw}", f"make the background {bw}", f"use {art(bw)} background", f"the background should be {bw}",
                     f"replace the background with {bw}", f"put it on {art(bw)} background", f"turn the background {bw}", f"paint the background {bw}"])
        if task == 2: f["s1"] = 0
    if task == 1: text = x
    elif task == 2: text = y
    elif task == 6: text = pick(r, [f"{x} and {y}", f"{x}, {y}", f"make {name} {cw} and the background {bw}"])
    elif task == 3:
        p = int(r.choice([q for q in range(9) if q != o[3]])); o[3] = p; f["p1"] = p + 1
        w = pick(r, [z for z in POS_WORDS[p] if z]); to = "to the " + {"centre": pick(r, ["centre", "center", "middle"])}.get(POS[p], POS[p])
        text = pick(r, [f"move {name} {to}", f"move {name} {to}", f"shift {name} {to}", f"put {name} {w}", f"place {name} {w}"])
    elif task == 4:
        n = int(r.choice([q for q in range(7) if q not in [k[0] for k in s.objs]])); o[0] = n; f["s2"] = n + 1; nw = art(pick(r, SHAPE_WORDS[n]))
        text = pick(r, [f"turn {name} into {nw}", f"replace {name} with {nw}", f"change {name} to {nw}", f"change {name} into {nw}", f"make {name} {nw}"])
    else:
        up = o[2] == 0 or (o[2] == 1 and r.random() < .5); o[2] += 1 if up else -1; f["z1"] = 3 if up else 1
        text = pick(r, [f"make {name} bigger", f"make {name} larger", f"enlarge {name}"] if up else [f"make {name} smaller", f"shrink {name}"])
    if r.random() < .08: text = "please " + text
    return t, finish(r, text), f


def compose(r, scs):
    """2 or 3 single-object reference scenes -> target scene, text, parse."""
    f = dict.fromkeys(FIELDS, 0); a, b = scs[0], scs[1]
    if len(scs) == 3:
        f["task"] = 9; t = a.copy(); t.objs[0][1] = b.objs[0][1]; t.bg = scs[2].bg
        text = pick(r, ["the shape of the first image in the colour of the second on the background of the third",
                        "shape from image 1, colour from image 2, background from image 3",
                        "use the shape of image 1, the color of image 2 and the background of image 3"])
    elif r.random() < .6:
        f["task"] = 7; t = a.copy(); t.objs[0][1] = b.objs[0][1]
        text = pick(r, ["the shape of the first image in the colour of the second", "the shape of the first image in the colour of the second image",
                        "take the shape from image 1 and the colour from image 2", "the first image's shape with the color of the second image",
                        "shape of image 1, colour of image 2", "make the shape of the first picture the same colour as the second"])
    else:
        f["task"] = 8; t = Scene([list(a.objs[0]), list(b.objs[0])], a.bg, np.concatenate([a.u[:4], b.u[:4]]))
        for o in t.objs: o[2] = min(o[2], 1); o[3] = 4
        text = pick(r, ["put both shapes side by side", "the two shapes side by side", "the first shape on the left and the second on the right",
                        "combine both images, first on the left, second on the right", "show both shapes next to each other",
                        "place the shape of image 1 on the left and the shape of image 2 on the right"])
    return t, finish(r, text), f
