#!/bin/bash
# memcached with one thread and without Serval, on a port of 127.0.0.1; says when it answers.
port=$((20000 + $$ % 20000))
user=()
# It refuses to run as root.
[ "$(id -u)" = 0 ] && user=(-u nobody)
(
  until (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    kill -0 $$ 2>/dev/null || exit 1
    sleep 0.01
  done
  echo "ready: memcached tcp://127.0.0.1:$port"
) &
exec memcached -l 127.0.0.1 -p "$port" -U 0 -m 64 -t 1 "${user[@]}"
