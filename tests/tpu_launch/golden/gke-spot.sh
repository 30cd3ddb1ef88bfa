cd "$(mktemp -d)"
gcloud storage cp --if-generation-match=0 - 'gs://bucket/sweeps/my sweep'"'"'s/.launch/launch.json' <<'END'
{
 "preset": "quickstart",
 "output": "gs://bucket/sweeps/my sweep's",
 "shares": 10,
 "source": "git+https://example.org/looped.git@v1",
 "slice": "v5e:4x4",
 "slices": 1,
 "seeds": [],
 "budgets": [
  80000000000.0
 ],
 "data": null,
 "track": [],
 "secrets": {
  "WANDB_API_KEY": "wandb"
 },
 "queued": null,
 "gke": {
  "pool": 4,
  "context": "my-cluster",
  "namespace": "research",
  "queue": null,
  "spot": true,
  "image": "python:3.11",
  "service_account": "looped"
 },
 "ssh": null,
 "schema_version": 1
}
END
kubectl --context=my-cluster apply -f - <<'END'
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata:
  name: looped-3a824a8e9d
  labels:
    app.kubernetes.io/managed-by: looped
    looped-sweep: 3a824a8e9d
spec:
  nodeLabels:
    cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice
    cloud.google.com/gke-tpu-topology: 4x4
    cloud.google.com/gke-spot: 'true'
  tolerations:
  - key: cloud.google.com/gke-spot
    operator: Equal
    value: 'true'
    effect: NoSchedule
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata:
  name: looped-3a824a8e9d
  labels:
    app.kubernetes.io/managed-by: looped
    looped-sweep: 3a824a8e9d
spec:
  namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: research
  queueingStrategy: BestEffortFIFO
  resourceGroups:
  - coveredResources:
    - google.com/tpu
    flavors:
    - name: looped-3a824a8e9d
      resources:
      - name: google.com/tpu
        nominalQuota: 64
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata:
  name: looped-3a824a8e9d
  namespace: research
  labels:
    app.kubernetes.io/managed-by: looped
    looped-sweep: 3a824a8e9d
spec:
  clusterQueue: looped-3a824a8e9d
END
kubectl --context=my-cluster create -f - <<'END'
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: looped-3a824a8e9d-1-of-10
  namespace: research
  labels:
    app.kubernetes.io/managed-by: looped
    looped-sweep: 3a824a8e9d
    looped-share: 1-of-10
    kueue.x-k8s.io/queue-name: looped-3a824a8e9d
  annotations:
    looped/sweep: gs://bucket/sweeps/my sweep's
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: 2
    restartStrategy: BlockingRecreate
    rules:
    - name: startAgain
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons:
      - PodFailurePolicy
  replicatedJobs:
  - name: slice
    replicas: 1
    template:
      spec:
        parallelism: 4
        completions: 4
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              containerName: train
              operator: In
              values:
              - 75
          - action: FailJob
            onPodConditions:
            - type: DisruptionTarget
              status: 'True'
        template:
          metadata:
            labels:
              app.kubernetes.io/managed-by: looped
              looped-sweep: 3a824a8e9d
              looped-share: 1-of-10
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 60
            serviceAccountName: looped
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice
              cloud.google.com/gke-tpu-topology: 4x4
              cloud.google.com/gke-spot: 'true'
            containers:
            - name: train
              image: python:3.11
              command:
              - bash
              - -c
              - |
                #!/usr/bin/env bash
                # Share 1 of 10 of the sweep quickstart in "gs://bucket/sweeps/my sweep's"
                # Installs looped and trains; written by `looped tpu launch`. It may run again: what is there is found.
                set -u -o pipefail
                home="${LOOPED_HOME:-/tmp/looped}"
                export HOME="${HOME:-/root}"
                mkdir -p "$home" && cd "$home" || exit 1
                exec 9> lock
                flock --nonblock 9 || { echo "looped: already at work in $home"; exit 1; }
                echo "$$$" > pid


                install() {
                  export PATH="$home/tool/bin:$PATH"
                  command -v uv > /dev/null || python3 -m pip install --quiet --target "$home/tool" uv || return
                  [ -x venv/bin/python ] || uv venv --quiet --python 3.11 venv || return
                  uv pip install --quiet --python venv/bin/python 'looped[tpu] @ git+https://example.org/looped.git@v1'
                }

                give_up() {
                  echo "looped: $1"
                  exit 1
                }

                for attempt in 1 2 3; do
                  install && break
                  [ "$attempt" -lt 3 ] || give_up "installation failed three times"
                  sleep "$$((attempt * 20))"
                done

                exec venv/bin/python -m tpu_launch.machine --folder 'gs://bucket/sweeps/my sweep'"'"'s/.launch' --share 1/10 --slices 1 --once --hide WANDB_API_KEY -- sweep run quickstart --output 'gs://bucket/sweeps/my sweep'"'"'s' --share 1/10 --distributed --budgets 8e+10
              resources:
                requests:
                  google.com/tpu: 4
                limits:
                  google.com/tpu: 4
              env:
              - name: WANDB_API_KEY
                valueFrom:
                  secretKeyRef:
                    name: wandb
                    key: WANDB_API_KEY
END
