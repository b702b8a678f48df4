#!/bin/bash
# memcached with one thread and without Serval, on a free port of 127.0.0.1; says when it answers, and at its end what it did.
set -u
folder=$(mktemp -d)
chmod 755 "$folder"
user=()
# It refuses to run as root, and the other user writes the file with the port.
if [ "$(id -u)" = 0 ]; then
  name=$(getent passwd 65534 | cut -d: -f1)
  user=(-u "$name") && chown "$name" "$folder"
fi
MEMCACHED_PORT_FILENAME=$folder/port memcached -l 127.0.0.1 -p -1 -U 0 -m 64 -t 1 "${user[@]}" &
server=$!

# One figure of `stats`.
figure() { sed -n "s/^STAT $1 \([0-9]*\).*/\1/p" "$folder/stats"; }

end() {
  exec 3<>"/dev/tcp/127.0.0.1/$port"
  printf 'stats\r\nquit\r\n' >&3
  tr -d '\r' <&3 >"$folder/stats"
  messages=$(($(figure cmd_get) + $(figure cmd_set)))
  # User and system time, in ticks of 10 ms.
  read -r -a stat </proc/$server/stat
  cpu_ns=$(((stat[13] + stat[14]) * 10000000))
  kill -TERM $server
  wait $server
  rm -rf "$folder"
  echo "{\"messages\": $messages, \"busy_ns\": $cpu_ns, \"cpu_ns\": $cpu_ns}"
  exit 0
}
trap end TERM INT

until port=$(sed -n 's/^TCP INET: //p' "$folder/port" 2>/dev/null) && [ -n "$port" ]; do
  kill -0 $server 2>/dev/null || exit 1
  sleep 0.01
done
echo "ready: memcached tcp://127.0.0.1:$port"
wait $server
exit 1
