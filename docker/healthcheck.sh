#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Healthy when GET /health answers 200. The port is the one that process 1 was started with; bash's
# /dev/tcp needs no further program in the image.
port=20000
mapfile -d '' -t arguments </proc/1/cmdline
for i in "${!arguments[@]}"; do
    [ "${arguments[$i]}" = --port ] && port=${arguments[$((i + 1))]}
done
exec 3<>"/dev/tcp/127.0.0.1/$port" || exit 1
printf 'GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3
read -r _ status _ <&3
[ "$status" = 200 ]
