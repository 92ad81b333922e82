"""The x-ray counts what can be counted by hand, finds the line of a conflict, and refuses what it cannot show.

By hand, for its table: ./learn xray 04 tiled
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "04_cuda_forward/check"))

import xray_ncu  # noqa: E402

PATTERNS = "common/tests/xray_patterns.cpp"
LOOKS, OTHERS = "build/xray/looks.o", "build/xray/others.o"
SAID = re.compile(r"// (read|write|add) (\w+): (\d+) (\d+) (\d+) (\d+)$")
COLOURS = {"#0072B2": "global", "#D55E00": "shared"}
COUNTED = ("times", "lanes", "took", "least")


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def learn(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([root / "learn", "xray", *words], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL, timeout=200)


def tile(*words: str) -> Counter[str]:
    """What 128 queries and 128 keys more cost an SM, of all kernels of a launch together."""
    done = learn(ROOT, "06", *words)
    total: Counter[str] = Counter()
    for part in done.stdout.split("\ncycles of an SM for 128 queries and 128 keys more\n")[1:]:
        for name, cycles in re.findall(r"^ +(\S.*?) +(\d+\.\d)$", part.split("\n\n")[0], re.M):
            total[name] += float(cycles)
    return total


def counts(rows: list[dict[str, str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update({name: int(row[name]) for name in COUNTED})
    return total


class Counts(unittest.TestCase):
    """In a copy of the tree for all tests, with what looks at kernels from the tree itself, where it takes some seconds to
    compile; common.see wants it too."""

    root: Path

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = Path(folder.name)
        for name in ("learn", "common/core", "common/emulator", "04_cuda_forward"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, cls.root / name, ignore=shutil.ignore_patterns("mine", "hunt", "results"))
            else:
                shutil.copy2(source, cls.root / name)
        (cls.root / "04_cuda_forward/mine").mkdir()
        learn(ROOT, "04", "tiled", "--n", "64")
        (cls.root / "build/xray").mkdir(parents=True)
        shutil.copy2(ROOT / LOOKS, cls.root / LOOKS)

    def test_each_line_takes_what_its_comment_says(self) -> None:
        compiler = os.environ.get("CXX", "c++")
        program = self.root / "patterns"
        subprocess.run([compiler, "@common/emulator/xray.flags", PATTERNS, "-c", "-o", f"{program}.o"], cwd=ROOT, check=True)
        subprocess.run([compiler, "-no-pie", "-o", program, self.root / LOOKS, f"{program}.o"], check=True)
        rows = table(subprocess.run([program, "--csv"], cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        said = 0
        for number, line in enumerate((ROOT / PATTERNS).read_text(encoding="utf-8").splitlines(), 1):
            if not (match := SAID.search(line)):
                continue
            said += 1
            op, memory, *numbers = match.groups()
            here = [row for row in rows if row["file"] == PATTERNS and row["line"] == str(number)
                    and row["op"] == op and memory in (row["memory"], row["array"])]
            with self.subTest(line=line.strip()):
                self.assertEqual(dict(counts(here)), dict(zip(COUNTED, map(int, numbers))))
        self.assertGreater(said, 30)
        self.assertEqual(len({row["via"] for row in rows if row["via"]}), 2)  # the two calls of sum_of

    def shared_reads(self, *words: str) -> Counter[str]:
        done = learn(self.root, *words, "--csv")
        self.assertEqual(done.returncode, 0, done.stderr)
        return counts([row for row in table(done.stdout) if row["memory"] == "shared" and row["op"] == "read"
                       and row["array"] == "Kj"])

    def test_a_missing_pad_is_found_in_the_readers_kernel_and_not_in_the_lesson(self) -> None:
        text = (ROOT / "04_cuda_forward/tiled.cu").read_text(encoding="utf-8")
        self.assertIn("pad = 1", text)
        (self.root / "04_cuda_forward/mine/tiled.cu").write_text(text.replace("pad = 1", "pad = 0"), encoding="utf-8")
        lesson, mine = self.shared_reads("04", "tiled", "--n", "64"), self.shared_reads("04", "mine", "--n", "64")
        self.assertEqual(lesson["took"], lesson["times"])
        self.assertEqual(mine["times"], lesson["times"])
        self.assertEqual(mine["took"], 32 * mine["times"])
        again = learn(self.root, "04", "mine", "tiled", "--n", "64")
        self.assertEqual(again.stderr, "")  # nothing to compile
        self.assertRegex(again.stdout, r"reads Kj .* 32\.00   1\.00  <-")

    def test_what_cannot_be_is_refused_in_a_line(self) -> None:
        for words, said in ((["--n", "0"], "--n is a number from 1 to 4096, got '0'"),
                            (["--n", "many"], "--n is a number from 1 to 4096, got 'many'"),
                            (["--d", "129"], "--d is a number from 1 to 128, got '129'")):
            done = learn(self.root, "04", "tiled", *words)
            self.assertEqual((done.returncode, done.stderr.splitlines()[-1]), (2, f"xray: {said}"))
        done = learn(self.root, "04", "tiled", "--svg", str(self.root / "no/folder.svg"))
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.splitlines()[-1], f"xray: cannot write {self.root}/no/folder.svg")
        (self.root / "04_cuda_forward/mine/other.cu").write_text("void launch_other(\n", encoding="utf-8")
        done = learn(self.root, "04", "mine", "other")
        self.assertEqual(done.returncode, 1)
        self.assertIn("04_cuda_forward/mine/other.cu does not compile", done.stderr.splitlines()[-1])

    def test_the_picture_shows_who_reads_what_and_when(self) -> None:
        picture = self.root / "build/tiled.svg"
        done = subprocess.run([self.root / "learn", "xray", "04", "tiled", "--n", "128", "--svg", "tiled.svg"], check=False,
                              cwd=picture.parent, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, 0, done.stderr)
        drawn = picture.read_text(encoding="utf-8")
        boxes: dict[str, list[dict[str, float]]] = {}
        for panel in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}g"):
            for box in panel[:-1]:  # the last is the frame
                where = {name: float(box.attrib[name]) for name in ("x", "y", "width", "height")}
                boxes.setdefault(f"{panel.attrib['class']} {COLOURS[box.attrib['fill']]}", []).append(where)
        warps = range(4)
        fetched = Counter(box["y"] for w in warps for box in boxes[f"K w{w} global"])
        self.assertEqual((len(fetched), set(fetched.values())), (64, {2}))  # of each two rows two warps have one
        for w in warps:
            tiles = boxes[f"K w{w} shared"]  # and all of it is read by every warp, a tile after the other
            self.assertEqual([box["height"] for box in tiles], [24] * 4)
            self.assertEqual(tiles, sorted(tiles, key=lambda box: (box["x"], box["y"])))
            self.assertLess(boxes[f"K w{w} global"][0]["x"], tiles[0]["x"])
            self.assertEqual({box["height"] for box in boxes[f"Q w{w} shared"]}, {24})  # four rows of sixteen
        self.assertEqual(len({boxes[f"Q w{w} shared"][0]["y"] for w in warps}), 4)
        # Drawn anew: ./learn xray 04 tiled --n 128 --svg docs/pictures/xray_tiled.svg
        self.assertEqual((ROOT / "docs/pictures/xray_tiled.svg").read_text(encoding="utf-8"), drawn)


def cells(page: str, first: str) -> list[str]:
    """The numbers of the first row of a page's tables that begins with this cell."""
    [row, *_] = (line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith(f"| {first}"))
    return [cell.strip(" *") for cell in row.split("|")[2:-1]]


class TensorCores(unittest.TestCase):
    """Stage 06: what its kernels ask of an SM is what the tables of its pages say."""

    def test_a_tile_of_the_forward(self) -> None:
        said = dict(zip(("tensor cores", "exponentials", "shared memory"), map(float, cells("06_optimized/README.md", "128 |"))))
        # For the factor of a row, which its four lanes each compute.
        said["exponentials"] += 128 * 4 / 16
        asked = tile("hopper")
        self.assertEqual({name: asked[name] for name in said}, said)
        # As the page says: 192 rows share K and V; and Q is read again every 80 keys.
        self.assertEqual(tile("hopper", "--d", "64")["shared memory"], 810.7)
        self.assertEqual(tile("hopper", "--d", "256")["shared memory"], 3891.2)
        page = (ROOT / "06_optimized/README.md").read_text(encoding="utf-8")
        self.assertRegex(page, "2048, 1056 and 1792.* 811 at d = 64.* 3891 at d = 256")

    def test_a_step_of_the_backward(self) -> None:
        page = "06_optimized/backward/README.md"
        for column, (d, step) in enumerate(((64, 1.0), (128, 0.5))):  # of 128 x 128
            said = {name: float(cells(page, name)[column].replace("–", "0")) for name in (
                "**tensor cores**", "**exponentials**", "– operands of S and dP", "– dO and Q for dV and dK", "– dS and K for dQ",
                "– Q and dO arrive", "– dS is written", "– dQ, fp32", "– L and D are read", "**shared memory**")}
            self.assertEqual(said["**shared memory**"], sum(x for name, x in said.items() if name.startswith("–")))
            asked = {name: step * cycles for name, cycles in tile("backward_hopper", "--d", str(d)).items()}
            queries = 128 * step
            self.assertEqual(asked["tensor cores"], said["**tensor cores**"])
            self.assertEqual(asked["exponentials"], said["**exponentials**"])
            self.assertEqual(asked["wgmma reads"], sum(said[f"– {what}"] for what in (
                "operands of S and dP", "dO and Q for dV and dK", "dS and K for dQ")))
            self.assertEqual(asked["TMA loads into"], said["– Q and dO arrive"] + 2 * queries * 4 / 128)  # and L and D
            self.assertEqual(asked["stmatrix writes"], said["– dS is written"])
            # Beside the table: the loader writes where the step's rows begin, and reads five numbers of its tile; who adds
            # dQ itself reads where they begin, a warp at a time.
            told, asks = 1, 5 + (8 if d == 64 else 0)
            self.assertEqual(asked.get("writes", 0) + asked.get("TMA adds from", 0), said["– dQ, fp32"] + told)
            self.assertEqual(asked["reads"], said["– L and D are read"] + asks)
        [_, said_of_fused, _] = cells("06_optimized/backward/4_fused.md", "here")
        self.assertEqual(tile("backward_fused")["shared memory"] / 2, float(said_of_fused) + 2 * 64 * 4 / 128)

    def test_conflicts_of_the_first_backward(self) -> None:
        [_, _, said] = cells("06_optimized/backward/1_mma.md", "all seven")
        self.assertEqual(tile("backward_mma")["reads"] / 4, float(said.strip("*").replace(",", "")))

    def test_a_swizzle_of_too_few_bits_is_seen_by_the_line(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name in ("common/core", "common/emulator", "06_optimized"):
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("mine", "hunt", "results", "pictures"))
            shutil.copy2(ROOT / "learn", root / "learn")
            learn(ROOT, "06", "swizzle", "--csv")
            layout = root / "06_optimized/ptx/fragments.hpp"
            text = layout.read_text(encoding="utf-8")
            self.assertEqual(text.count("row & 7"), 1)
            layout.write_text(text.replace("row & 7", "row & 3"), encoding="utf-8")
            (root / "build/xray").mkdir(parents=True)
            for made in (LOOKS, OTHERS):  # newer than the change, which is none to them: nothing to compile
                shutil.copy(ROOT / made, root / made)
            for where, turns in ((ROOT, 4), (root, 8)):
                rows = [row for row in table(learn(where, "06", "forward/3_swizzle", "--csv").stdout) if row["op"] == "ldmatrix"]
                self.assertEqual(len(rows), 3)
                for row in rows:
                    self.assertEqual(int(row["took"]), turns * int(row["times"]))
                    self.assertEqual(int(row["lanes"]), 32 * int(row["times"]))

    def test_the_profilers_table_shows_what_the_xray_counts_today(self) -> None:
        recorded = (ROOT / "06_optimized/results/nvidia-h200.xray.txt").read_text(encoding="utf-8")
        for name in ("swizzle", "hopper", "backward_hopper"):
            [said] = re.findall(rf"^06 {name}\n\n((?:\|.*\n)+)", recorded, re.MULTILINE)
            lines = learn(ROOT, "06", name, "--csv").stdout.splitlines()
            counted = xray_ncu.xray(lines)
            rows, _ = xray_ncu.compare(counted, [sums for _, sums in counted])
            wanted = [[cell.strip() for cell in row.split("|")[2:5]] for row in rows[2:]]
            there = [[cell.strip() for cell in row.split("|")[2:5]] for row in said.splitlines()[2:]]
            self.assertEqual([row for row in there if row[2] != "0"], wanted)

    def test_a_name_is_a_launch_before_it_is_a_file(self) -> None:
        """05's dkv.cu launches atomic, too."""
        self.assertEqual({row["kernel"] for row in table(learn(ROOT, "05", "dkv", "--csv").stdout)}, {"dkv"})

    def test_what_it_cannot_show_is_refused_in_a_line(self) -> None:
        for words, said in ((("ring", "--d", "64"), "xray: this kernel takes --d 128, got 64"),
                            (("swizzle", "--d", "32"), "xray: this kernel takes --d 64 or 128, got 32"),
                            (("backward_hopper", "--d", "256"), "xray: this kernel takes --d up to 128 here, got 256"),
                            (("hopper", "--d", "257"), "xray: --d is a number from 1 to 256, got '257'")):
            done = learn(ROOT, "06", *words)
            self.assertEqual((done.returncode, done.stderr.splitlines()[-1]), (2, said))


class Ncu(unittest.TestCase):
    OURS = """kernel,file,line,via,op,memory,array,bytes,times,lanes,took,least
"one",a.cu,1,,read,global,Q,4,10,320,40,40
"one",a.cu,2,,read,shared,Kj,4,10,320,320,10
"two<1, 2>",a.cu,3,,write,global,O,16,10,320,160,160
"""

    def theirs(self, sectors: int) -> str:
        head = ["ID", "Kernel Name", *xray_ncu.METRICS]
        values: list[dict[str, str]] = [
            {"ID": "0", "Kernel Name": "one(float)", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": str(sectors),
             f"sm__{xray_ncu.TURNS}_ld.sum": "1,320"},
            {"ID": "1", "Kernel Name": "two", "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "160.000000"}]
        rows = [head, ["", ""] + ["sector"] * len(xray_ncu.METRICS), *([row.get(name, "0") for name in head] for row in values)]
        return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)

    def compared(self, sectors: int, ours: str = OURS) -> tuple[list[str], bool]:
        return xray_ncu.compare(xray_ncu.xray(ours.splitlines()), xray_ncu.ncu(self.theirs(sectors).splitlines()))

    def test_sectors_and_turns_are_judged_and_instructions_shown(self) -> None:
        ours = self.OURS.replace("320,320,10", "320,1320,10")
        lines, near = self.compared(40, ours)
        self.assertTrue(near)
        self.assertIn("| one | shared read | turns (wavefronts) | 1,320 | 1,320 | +0.0% |", lines)
        self.assertIn("| two<1, 2> | global write | sectors | 160 | 160 | +0.0% |", lines)
        self.assertFalse(self.compared(36, ours)[1])
        self.assertTrue(self.compared(37, ours)[1])
        self.assertFalse(self.compared(40)[1])

    def test_copies_are_loads_from_global_memory_and_no_stores_to_shared(self) -> None:
        rows = ('kernel,op,memory,times,took\n"k",read,global,1,4\n"k",copy,global,2,8\n"k",copy,shared,2,2\n'
                '"k",ldmatrix,shared,3,12\n"k",operands,shared,1,48\n"k",mma,,1,1\n')
        [(_, sums)] = xray_ncu.xray(rows.splitlines())
        self.assertEqual({name: count for name, count in sums.items() if count},
                         {"l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": 3,
                          "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 12,
                          "smsp__inst_executed_op_ldsm.sum": 3,
                          f"sm__{xray_ncu.TURNS}_ldsm.sum": 12,
                          f"sm__{xray_ncu.TURNS}_gmma.sum": 48})

    def test_a_kernel_is_found_where_it_is_launched(self) -> None:
        for number, kernel, file in (("04", "tiled", "04_cuda_forward/tiled.cu"),
                                     ("06", "lock", "06_optimized/forward/10_pingpong.cu"),
                                     ("06", "fa2", "06_optimized/forward/fa2.cu"),
                                     ("06", "hopper", "06_optimized/forward/hopper.cu"),
                                     ("06", "backward_hopper", "06_optimized/backward/hopper.cu")):
            [stage] = ROOT.glob(f"{number}_*")
            self.assertEqual(xray_ncu.file_of(stage, kernel), Path(file))
        with self.assertRaisesRegex(xray_ncu.Bad, "no kernel 'nothing' in 06_optimized"):
            xray_ncu.file_of(stage, "nothing")

    def test_other_files_are_refused(self) -> None:
        for ours, said in (("a,b\n1,2\n", "not a table"), ("", "has 0 kernels")):
            with self.assertRaisesRegex(xray_ncu.Bad, said):
                self.compared(40, ours)
        with self.assertRaisesRegex(xray_ncu.Bad, "not a table of ncu"):
            xray_ncu.ncu(['"ID","Kernel Name"', '"0","x"'])


if __name__ == "__main__":
    unittest.main()
