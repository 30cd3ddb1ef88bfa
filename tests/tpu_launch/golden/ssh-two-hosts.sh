cd "$(mktemp -d)"
sh -c 'mkdir -p -- "$(dirname -- "$1")" && { set -C; cat > "$1"; }' sh '/shared/my sweep/.launch/launch.json' <<'END'
{
 "preset": "quickstart",
 "output": "/shared/my sweep",
 "shares": 1,
 "source": "git+https://example.org/looped.git@v1",
 "slice": "v4:2x2x2",
 "slices": 1,
 "seeds": [],
 "budgets": [
  80000000000.0
 ],
 "data": null,
 "track": [],
 "secrets": {},
 "queued": null,
 "gke": null,
 "ssh": {
  "hosts": [
   "worker-0",
   "me@worker-1"
  ],
  "tpu_vms": [],
  "project": null,
  "zone": null,
  "hosts_per_share": 2,
  "port": 8476
 },
 "schema_version": 1
}
END
ssh -o BatchMode=yes -o ConnectTimeout=15 -- worker-0 'mkdir -p "$HOME/.looped/looped-ad16f14668-1-of-1" && cat > "$HOME/.looped/looped-ad16f14668-1-of-1"/new.sh && mv "$HOME/.looped/looped-ad16f14668-1-of-1"/new.sh "$HOME/.looped/looped-ad16f14668-1-of-1"/start.sh && { setsid nohup bash "$HOME/.looped/looped-ad16f14668-1-of-1"/start.sh > "$HOME/.looped/looped-ad16f14668-1-of-1"/out 2>&1 < /dev/null & }' <<'END'
#!/usr/bin/env bash
# Share 1 of 1 of the sweep quickstart in "/shared/my sweep"
# Installs looped and trains; written by `looped tpu launch`. It may run again: what is there is found.
set -u -o pipefail
home="$HOME/.looped/looped-ad16f14668-1-of-1"
export HOME="${HOME:-/root}"
mkdir -p "$home" && cd "$home" || exit 1
exec 9> lock
flock --nonblock 9 || { echo "looped: already at work in $home"; exit 0; }
echo "$$" > pid
exec > >(trap '' TERM; exec tee -a log) 2>&1

install() {
  export PATH="$home/tool/bin:$PATH"
  command -v uv > /dev/null || python3 -m pip install --quiet --target "$home/tool" uv || return
  [ -x venv/bin/python ] || uv venv --quiet --python 3.11 venv || return
  uv pip install --quiet --python venv/bin/python 'looped[tpu] @ git+https://example.org/looped.git@v1'
}

give_up() {
  echo "looped: $1"
  mkdir -p '/shared/my sweep/.launch/shares'; printf '%s\n' '{"share": 1, "shares": 1, "state": "failed", "failures": 3, "status": 1, "reason": "the project could not be installed", "host": "", "updated_at": ""}' > '/shared/my sweep/.launch/shares/1-of-1.json'
  exit 1
}

for attempt in 1 2 3; do
  install && break
  [ "$attempt" -lt 3 ] || give_up "installation failed three times"
  sleep "$((attempt * 20))"
done
export JAX_COORDINATOR_ADDRESS=worker-0:8476
export JAX_NUM_PROCESSES=2
export JAX_PROCESS_ID=0
exec venv/bin/python -m tpu_launch.machine --folder '/shared/my sweep/.launch' --share 1/1 --slices 1 -- sweep run quickstart --output '/shared/my sweep' --distributed --budgets 8e+10
END
ssh -o BatchMode=yes -o ConnectTimeout=15 -- me@worker-1 'mkdir -p "$HOME/.looped/looped-ad16f14668-1-of-1" && cat > "$HOME/.looped/looped-ad16f14668-1-of-1"/new.sh && mv "$HOME/.looped/looped-ad16f14668-1-of-1"/new.sh "$HOME/.looped/looped-ad16f14668-1-of-1"/start.sh && { setsid nohup bash "$HOME/.looped/looped-ad16f14668-1-of-1"/start.sh > "$HOME/.looped/looped-ad16f14668-1-of-1"/out 2>&1 < /dev/null & }' <<'END'
#!/usr/bin/env bash
# Share 1 of 1 of the sweep quickstart in "/shared/my sweep"
# Installs looped and trains; written by `looped tpu launch`. It may run again: what is there is found.
set -u -o pipefail
home="$HOME/.looped/looped-ad16f14668-1-of-1"
export HOME="${HOME:-/root}"
mkdir -p "$home" && cd "$home" || exit 1
exec 9> lock
flock --nonblock 9 || { echo "looped: already at work in $home"; exit 0; }
echo "$$" > pid
exec > >(trap '' TERM; exec tee -a log) 2>&1

install() {
  export PATH="$home/tool/bin:$PATH"
  command -v uv > /dev/null || python3 -m pip install --quiet --target "$home/tool" uv || return
  [ -x venv/bin/python ] || uv venv --quiet --python 3.11 venv || return
  uv pip install --quiet --python venv/bin/python 'looped[tpu] @ git+https://example.org/looped.git@v1'
}

give_up() {
  echo "looped: $1"
  mkdir -p '/shared/my sweep/.launch/shares'; printf '%s\n' '{"share": 1, "shares": 1, "state": "failed", "failures": 3, "status": 1, "reason": "the project could not be installed", "host": "", "updated_at": ""}' > '/shared/my sweep/.launch/shares/1-of-1.json'
  exit 1
}

for attempt in 1 2 3; do
  install && break
  [ "$attempt" -lt 3 ] || give_up "installation failed three times"
  sleep "$((attempt * 20))"
done
export JAX_COORDINATOR_ADDRESS=worker-0:8476
export JAX_NUM_PROCESSES=2
export JAX_PROCESS_ID=1
exec venv/bin/python -m tpu_launch.machine --folder '/shared/my sweep/.launch' --share 1/1 --slices 1 -- sweep run quickstart --output '/shared/my sweep' --distributed --budgets 8e+10
END
