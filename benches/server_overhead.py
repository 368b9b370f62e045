# SPDX-License-Identifier: Apache-2.0
"""The server's own time: what a request takes beyond the pipeline, and /health while a picture is made.

Usage: server_overhead.py URL [requests] [side]. Prints p50 and p99 in milliseconds. Run on an idle machine.
"""
import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit

url, requests, side = sys.argv[1], int((sys.argv + [0, 0])[2] or 200), int((sys.argv + [0, 0, 0])[3] or 512)
host = urlsplit(url).netloc


def percentiles(name, values):
    values = sorted(values)
    p50, p99 = (values[min(len(values) - 1, int(len(values) * share))] for share in (0.50, 0.99))
    print(f"{name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, n {len(values)}")


def ask(connection, method, path, body=None):
    start = time.perf_counter()
    connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
    answer = connection.getresponse().read()
    return (time.perf_counter() - start) * 1e3, answer


health, stop = [], threading.Event()


def probe():
    connection = http.client.HTTPConnection(host)
    while not stop.is_set():
        health.append(ask(connection, "GET", "/health")[0])
        time.sleep(0.02)


own = []
connection = http.client.HTTPConnection(host)
body = json.dumps({"prompt": "a red circle on a blue background", "width": side, "height": side, "seed": 1})
for number in range(requests):
    took, answer = ask(connection, "POST", "/predict", body)
    own.append(took - json.loads(answer)["timing_ms"]["total_ms"])
percentiles(f"own time of /predict at {side} x {side}", own)

thread = threading.Thread(target=probe)
thread.start()
for number in range(max(3, requests // 20)):
    ask(connection, "POST", "/predict", body)
stop.set()
thread.join()
percentiles("/health while pictures are made", health)
