cd "$(mktemp -d)"
gcloud storage cp --if-generation-match=0 - 'gs://bucket/sweeps/my sweep'"'"'s/.launch/launch.json' <<'END'
{
 "preset": "quickstart",
 "output": "gs://bucket/sweeps/my sweep's",
 "shares": 1,
 "source": "git+https://example.org/looped.git@v1",
 "slice": "v6e:2x4",
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
  "hosts": [],
  "tpu_vms": [
   "vm-1"
  ],
  "project": "p",
  "zone": "us-east5-b",
  "hosts_per_share": 1,
  "port": 8476
 },
 "schema_version": 1
}
END
cat > looped-3a824a8e9d-1-of-1.sh <<'END'
#!/usr/bin/env bash
# Share 1 of 1 of the sweep quickstart in "gs://bucket/sweeps/my sweep's"
# Installs looped and trains; written by `looped tpu launch`. It may run again: what is there is found.
set -u -o pipefail
home="$HOME/.looped/looped-3a824a8e9d-1-of-1"
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
  printf '%s\n' '{"share": 1, "shares": 1, "state": "failed", "failures": 3, "status": 1, "reason": "the project could not be installed", "host": "", "updated_at": ""}' | gcloud storage cp - 'gs://bucket/sweeps/my sweep'"'"'s/.launch/shares/1-of-1.json'
  exit 1
}

for attempt in 1 2 3; do
  install && break
  [ "$attempt" -lt 3 ] || give_up "installation failed three times"
  sleep "$((attempt * 20))"
done

exec venv/bin/python -m tpu_launch.machine --folder 'gs://bucket/sweeps/my sweep'"'"'s/.launch' --share 1/1 --slices 1 -- sweep run quickstart --output 'gs://bucket/sweeps/my sweep'"'"'s' --distributed --budgets 8e+10
END
gcloud compute tpus tpu-vm scp looped-3a824a8e9d-1-of-1.sh vm-1:looped-3a824a8e9d-1-of-1.sh --project=p --zone=us-east5-b --worker=all
gcloud compute tpus tpu-vm ssh vm-1 --project=p --zone=us-east5-b --worker=all '--command=mkdir -p "$HOME/.looped/looped-3a824a8e9d-1-of-1" && mv looped-3a824a8e9d-1-of-1.sh "$HOME/.looped/looped-3a824a8e9d-1-of-1"/start.sh && { setsid nohup bash "$HOME/.looped/looped-3a824a8e9d-1-of-1"/start.sh > "$HOME/.looped/looped-3a824a8e9d-1-of-1"/out 2>&1 < /dev/null & }'
