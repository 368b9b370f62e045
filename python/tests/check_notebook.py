# SPDX-License-Identifier: Apache-2.0
"""Every code cell of an executed notebook ran without a word on standard error, and pictures are shown."""

import json
import sys

cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
outputs = [output for cell in cells for output in cell["outputs"]]
assert all(cell["execution_count"] for cell in cells), "a cell did not run"
assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"], outputs
pictures = [output for output in outputs if "image/png" in output.get("data", {})]
assert len(pictures) >= 3, f"{len(pictures)} pictures"
print(f"ok: {len(cells)} cells, {len(pictures)} pictures")
