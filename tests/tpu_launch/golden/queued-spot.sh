cd "$(mktemp -d)"
gcloud storage cp --if-generation-match=0 - 'gs://bucket/sweeps/my sweep'"'"'s/.launch/launch.json' <<'END'
{
 "preset": "quickstart",
 "output": "gs://bucket/sweeps/my sweep's",
 "shares": 2,
 "source": "git+https://example.org/looped.git@v1",
 "slice": "v5e:4x4",
 "slices": 1,
 "seeds": [],
 "budgets": [
  80000000000.0
 ],
 "data": "gs://bucket/data",
 "track": [],
 "secrets": {
  "WANDB_API_KEY": "wandb"
 },
 "queued": {
  "project": "my-project",
  "zone": "us-west4-a",
  "spot": true,
  "reserved": false,
  "service_account": null,
  "network": null,
  "subnetwork": null
 },
 "gke": null,
 "ssh": null,
 "schema_version": 1
}
END
cat > looped-3a824a8e9d-1-of-2.sh <<'END'
#!/usr/bin/env bash
# Share 1 of 2 of the sweep quickstart in "gs://bucket/sweeps/my sweep's"
# Installs looped and trains; written by `looped tpu launch`. It may run again: what is there is found.
set -u -o pipefail
home="${LOOPED_HOME:-/opt/looped}"
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
  printf '%s\n' '{"share": 1, "shares": 2, "state": "failed", "failures": 3, "status": 1, "reason": "the project could not be installed", "host": "", "updated_at": ""}' | gcloud storage cp - 'gs://bucket/sweeps/my sweep'"'"'s/.launch/shares/1-of-2.json'
  gcloud compute tpus queued-resources delete looped-3a824a8e9d-1-of-2 --project=my-project --zone=us-west4-a --force --quiet --async
  exit 1
}

for attempt in 1 2 3; do
  install && break
  [ "$attempt" -lt 3 ] || give_up "installation failed three times"
  sleep "$((attempt * 20))"
done
export LOOPED_DATA=gs://bucket/data
WANDB_API_KEY=$(gcloud secrets versions access latest --secret=wandb --project=my-project) || give_up 'the secret wandb cannot be read'
export WANDB_API_KEY
exec venv/bin/python -m tpu_launch.machine --folder 'gs://bucket/sweeps/my sweep'"'"'s/.launch' --share 1/2 --slices 1 --release 'gcloud compute tpus queued-resources delete looped-3a824a8e9d-1-of-2 --project=my-project --zone=us-west4-a --force --quiet --async' --hide WANDB_API_KEY -- sweep run quickstart --output 'gs://bucket/sweeps/my sweep'"'"'s' --share 1/2 --distributed --budgets 8e+10
END
gcloud compute tpus queued-resources create looped-3a824a8e9d-1-of-2 --project=my-project --zone=us-west4-a --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --node-id=looped-3a824a8e9d-1-of-2 --labels=looped-sweep=3a824a8e9d,looped-share=1-of-2 '--description=looped sweep gs://bucket/sweeps/my sweep'"'"'s' --metadata-from-file=startup-script=looped-3a824a8e9d-1-of-2.sh --scopes=https://www.googleapis.com/auth/cloud-platform --spot --async
cat > looped-3a824a8e9d-2-of-2.sh <<'END'
#!/usr/bin/env bash
# Share 2 of 2 of the sweep quickstart in "gs://bucket/sweeps/my sweep's"
# Installs looped and trains; written by `looped tpu launch`. It may run again: what is there is found.
set -u -o pipefail
home="${LOOPED_HOME:-/opt/looped}"
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
  printf '%s\n' '{"share": 2, "shares": 2, "state": "failed", "failures": 3, "status": 1, "reason": "the project could not be installed", "host": "", "updated_at": ""}' | gcloud storage cp - 'gs://bucket/sweeps/my sweep'"'"'s/.launch/shares/2-of-2.json'
  gcloud compute tpus queued-resources delete looped-3a824a8e9d-2-of-2 --project=my-project --zone=us-west4-a --force --quiet --async
  exit 1
}

for attempt in 1 2 3; do
  install && break
  [ "$attempt" -lt 3 ] || give_up "installation failed three times"
  sleep "$((attempt * 20))"
done
export LOOPED_DATA=gs://bucket/data
WANDB_API_KEY=$(gcloud secrets versions access latest --secret=wandb --project=my-project) || give_up 'the secret wandb cannot be read'
export WANDB_API_KEY
exec venv/bin/python -m tpu_launch.machine --folder 'gs://bucket/sweeps/my sweep'"'"'s/.launch' --share 2/2 --slices 1 --release 'gcloud compute tpus queued-resources delete looped-3a824a8e9d-2-of-2 --project=my-project --zone=us-west4-a --force --quiet --async' --hide WANDB_API_KEY -- sweep run quickstart --output 'gs://bucket/sweeps/my sweep'"'"'s' --share 2/2 --distributed --budgets 8e+10
END
gcloud compute tpus queued-resources create looped-3a824a8e9d-2-of-2 --project=my-project --zone=us-west4-a --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --node-id=looped-3a824a8e9d-2-of-2 --labels=looped-sweep=3a824a8e9d,looped-share=2-of-2 '--description=looped sweep gs://bucket/sweeps/my sweep'"'"'s' --metadata-from-file=startup-script=looped-3a824a8e9d-2-of-2.sh --scopes=https://www.googleapis.com/auth/cloud-platform --spot --async
