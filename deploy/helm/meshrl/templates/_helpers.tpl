{{- define "meshrl.name" -}}
{{- printf "%s-%s" .root.Release.Name .component | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "meshrl.selector" -}}
app.kubernetes.io/name: meshrl
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "meshrl.labels" -}}
{{ include "meshrl.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* A workload's labels: those above, and the queue that it waits in. */}}
{{- define "meshrl.workloadLabels" -}}
{{ include "meshrl.labels" . }}
{{- with .root.Values.kueue.queueName }}
kueue.x-k8s.io/queue-name: {{ . }}
{{- end }}
{{- end -}}

{{- define "meshrl.serviceAccountName" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}{{ else if .Values.serviceAccount.create }}{{ printf "%s-meshrl" .Release.Name }}{{ else }}default{{ end -}}
{{- end -}}

{{- define "meshrl.secretName" -}}
{{- .Values.config.secrets.name | default (printf "%s-meshrl" .Release.Name) -}}
{{- end -}}

{{/* host:port of a service: another release's, or this one's. */}}
{{- define "meshrl.address" -}}
{{- $external := index .root.Values.external .component -}}
{{- if $external }}{{ $external }}{{ else }}{{ include "meshrl.name" . }}:{{ include "meshrl.port" .component }}{{ end -}}
{{- end -}}

{{- define "meshrl.port" -}}
{{- index (dict "rollout" "50051" "trainer" "50052" "weights" "50053" "orchestrator" "50054" "inference" "8000") . -}}
{{- end -}}

{{/* A program's TOML: what the values say over what follows from the release. */}}
{{- define "meshrl.toml" -}}
{{- $v := .root.Values -}}
{{- $server := dict "port" (include "meshrl.port" .component | int) "insecure" (not $v.tls.enabled) -}}
{{- $given := dict "server" $server "output_dir" "/outputs" -}}
{{- $model := deepCopy $v.config.model -}}
{{- $hub := include "meshrl.address" (dict "root" .root "component" "weights") -}}
{{- if eq .component "orchestrator" -}}
  {{- $rollouts := $v.external.rollout -}}
  {{- if $v.rollout.enabled -}}{{- $rollouts = prepend $rollouts (include "meshrl.address" (dict "root" (dict "Release" .root.Release "Values" (dict "external" (dict "rollout" ""))) "component" "rollout")) -}}{{- end -}}
  {{- $_ := set $given "services" (dict "rollout" $rollouts "weights" $hub "trainer" (include "meshrl.address" (dict "root" .root "component" "trainer"))) -}}
  {{- $_ := set $given "session" .root.Release.Name -}}
  {{- $_ := set $given "max_steps" $v.config.maxSteps -}}
{{- else if eq .component "trainer" -}}
  {{- $_ := set $given "model" $model -}}
  {{- $_ := set $given "max_steps" $v.config.maxSteps -}}
  {{- $_ := set $given "weight_broadcast" (dict "type" "stream" "address" $hub) -}}
  {{- if eq (int $v.trainer.replicas) 1 -}}{{- $_ := set $given "deployment" (dict "num_train_gpus" (max 1 (int $v.trainer.gpu.count))) -}}{{- end -}}
{{- else if eq .component "rollout" -}}
  {{- $_ := set $given "model" $model -}}
  {{- $_ := set $given "weights" $hub -}}
  {{- $envs := list -}}
  {{- $eval := dict -}}
  {{- with $v.config.orchestrator.eval -}}{{- $eval = . -}}{{- end -}}
  {{- range concat ($v.config.orchestrator.train.env | default list) ($eval.env | default list) -}}
    {{- $envs = append $envs (pick . "id" "name" "args" "sampling" "seq_len" "workers" "isolated" "max_memory_mib" "deadlines") -}}
  {{- end -}}
  {{- $_ := set $given "env" (uniq $envs) -}}
{{- else if eq .component "inference" -}}
  {{- $_ := set $given "model" $model -}}
  {{- $_ := set $given "weight_broadcast" (dict "type" "stream" "address" $hub) -}}
{{- else -}}
  {{- if $v.inference.enabled -}}{{- $_ := set $given "min_engines" (int $v.inference.replicas) -}}{{- end -}}
{{- end -}}
{{- $own := deepCopy (index $v.config .component) -}}
{{/* Values have no whole numbers, only floats: 100 comes as 100.0. */}}
{{- regexReplaceAll "(?m)= (-?[0-9]+)\\.0$" (toToml (mergeOverwrite $given $own)) "= ${1}" }}
{{- end -}}

{{/* The pod of a component. `args` are those of the program, `volumes` where it keeps what it writes. */}}
{{- define "meshrl.podTemplate" -}}
{{- $v := index .root.Values .component -}}
{{- $image := index .root.Values.image .image -}}
metadata:
  labels:
    {{- include "meshrl.labels" . | nindent 4 }}
  annotations:
    checksum/config: {{ include "meshrl.toml" . | sha256sum }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "meshrl.serviceAccountName" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ .root.Values.securityContext.runAsUser }}
    runAsGroup: {{ .root.Values.securityContext.fsGroup }}
    fsGroup: {{ .root.Values.securityContext.fsGroup }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ printf "%s%s" $image.repository (ternary (printf "@%s" $image.digest) (printf ":%s" $image.tag) (ne $image.digest "")) | quote }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      {{- if not $v.autoStart }}
      command: ["sleep", "infinity"]
      {{- else if $v.command }}
      command:
        {{- toYaml $v.command | nindent 8 }}
      {{- else }}
      command: ["/bin/sh", "-ec", {{ printf "%s%s" (include "meshrl.joinScript" .) .script | quote }}, {{ .component | quote }}]
      args:
        - "@"
        - /etc/meshrl/{{ .component }}.toml
        - --server.host
        - {{ ternary "$(POD_IP)" "0.0.0.0" (eq .component "inference") | quote }}
        {{- if and (eq .component "inference") (eq (include "meshrl.tlsBy" .root) "secrets") }}
        - --url
        - {{ printf "https://$(POD_NAME).%s.%s.svc:8000" (include "meshrl.name" .) .root.Release.Namespace | quote }}
        {{- end }}
        {{- with $v.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- if eq (include "meshrl.tlsBy" .root) "join" }}
        - name: POD_UID # a pod has its own key, and another pod of the same name another one
          valueFrom: {fieldRef: {fieldPath: metadata.uid}}
        {{- end }}
        - name: STATEFUL_REPLICAS
          value: {{ $v.replicas | default 1 | quote }}
        - name: INFERENCE_URL
          value: {{ printf "%s://%s:8000/v1" (ternary "https" "http" .root.Values.tls.enabled) (include "meshrl.name" (dict "root" .root "component" "inference")) }}
        - name: HOME
          value: /tmp
        - name: HF_HOME
          value: /cache/huggingface
        {{- if eq (include "meshrl.tlsBy" .root) "secrets" }}
        - {name: MESHRL_TLS_CA, value: /etc/meshrl-tls/ca.crt}
        - {name: MESHRL_TLS_CERT, value: /etc/meshrl-tls/tls.crt}
        - {name: MESHRL_TLS_KEY, value: /etc/meshrl-tls/tls.key}
        {{- else if .root.Values.tls.enabled }}
        - {name: MESHRL_TLS_FOLDER, value: /tmp/credentials}
        - name: MESHRL_JOIN_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .root.Values.tls.join.secret }}, key: {{ .component }}}}
        {{- end }}
        {{- if and .root.Values.tls.enabled (ne .component "inference") }}
        - {name: MESHRL_HEALTH, value: "127.0.0.1:{{ include "meshrl.port" .component }}"}
        {{- end }}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $v.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if or .root.Values.config.secrets.enabled .root.Values.config.secrets.values }}
      envFrom:
        - secretRef: {name: {{ include "meshrl.secretName" .root }}}
      {{- end }}
      ports:
        - name: {{ ternary "http" "grpc" (eq .component "inference") }}
          containerPort: {{ include "meshrl.port" .component }}
        {{- with .ports }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- if and $v.autoStart (not .headless) }}
      {{- if eq .component "inference" }}
      {{- $get := ternary "{path: %s, port: http, scheme: HTTPS}" "{path: %s, port: http}" .root.Values.tls.enabled }}
      startupProbe: {httpGet: {{ printf $get "/health" }}, periodSeconds: 10, failureThreshold: 180}
      livenessProbe: {httpGet: {{ printf $get "/ping" }}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      readinessProbe: {httpGet: {{ printf $get "/health" }}, periodSeconds: 5, timeoutSeconds: 5}
      {{- else if and .probes .root.Values.tls.enabled }}
      # Kubernetes' gRPC probes know no TLS: the image's own check shows the pod's certificate.
      startupProbe: {exec: {command: [python, /opt/healthcheck.py]}, periodSeconds: 10, timeoutSeconds: 10, failureThreshold: 180}
      livenessProbe: {exec: {command: [python, /opt/healthcheck.py]}, periodSeconds: 30, timeoutSeconds: 10, failureThreshold: 4}
      {{- with .service }}
      readinessProbe: {exec: {command: [python, /opt/healthcheck.py, {{ . }}]}, periodSeconds: 15, timeoutSeconds: 10}
      {{- end }}
      {{- else if .probes }}
      {{- $port := include "meshrl.port" .component }}
      startupProbe: {grpc: {port: {{ $port }}}, periodSeconds: 10, failureThreshold: 180}
      livenessProbe: {grpc: {port: {{ $port }}}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      {{- with .service }}
      readinessProbe: {grpc: {port: {{ $port }}, service: {{ . }}}, periodSeconds: 5, timeoutSeconds: 5}
      {{- end }}
      {{- end }}
      {{- end }}
      {{- if ne .component "orchestrator" }}
      lifecycle: # traffic that is on its way arrives before the program drains
        preStop: {exec: {command: ["sleep", "5"]}}
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      resources:
        {{- $resources := deepCopy $v.resources }}
        {{- if $v.gpu }}{{ if and $v.gpu.enabled (gt (int $v.gpu.count) 0) }}
        {{- $limits := merge (dict $v.gpu.resource (int $v.gpu.count)) ($resources.limits | default dict) }}
        {{- $_ := set $resources "limits" $limits }}
        {{- end }}{{ end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/meshrl, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /cache}
        - {name: outputs, mountPath: /outputs}
        - {name: shm, mountPath: /dev/shm}
        {{- if eq (include "meshrl.tlsBy" .root) "secrets" }}
        - {name: tls, mountPath: /etc/meshrl-tls, readOnly: true}
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "meshrl.name" . }}}
    - {name: tmp, emptyDir: {}}
    - {name: cache, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory}}
    {{- if eq (include "meshrl.tlsBy" .root) "secrets" }}
    - name: tls
      secret: {secretName: {{ include "meshrl.tlsSecret" . }}, defaultMode: 0440}
    {{- end }}
    {{- if .claim }}
    - name: outputs
      persistentVolumeClaim: {claimName: {{ .claim }}}
    {{- else if not .keeps }}
    - {name: outputs, emptyDir: {}}
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- range $key := list "nodeSelector" "affinity" "tolerations" }}
  {{- with index $v $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Where a pod has its certificate from: a Secret, or the hub that it joins. */}}
{{- define "meshrl.tlsBy" -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.enabled $tls.join.address -}}
  {{- if .Values.weights.enabled -}}{{- fail "tls.join.address: pods join a run whose hub is elsewhere, and weights.enabled starts one here; set external.weights and weights.enabled=false, or leave tls.join out" -}}{{- end -}}
  {{- if or (not $tls.join.caHash) (not $tls.join.secret) -}}{{- fail "tls.join: address goes with caHash and secret; set all three" -}}{{- end -}}
join
{{- else if $tls.enabled -}}
secrets
{{- end -}}
{{- end -}}

{{- define "meshrl.tlsSecret" -}}
{{- index .root.Values.tls.secrets .component | default (printf "%s-tls" (include "meshrl.name" .)) -}}
{{- end -}}

{{- define "meshrl.joinScript" -}}
{{- if eq (include "meshrl.tlsBy" .root) "join" -}}
until meshrl join {{ .root.Values.tls.join.address }} --ca-hash {{ .root.Values.tls.join.caHash }} --name "$(printf '%.54s-%.8s' "$POD_NAME" "$POD_UID")" --host "$POD_IP" --folder /tmp/credentials; do sleep 5; done
{{ end -}}
{{- end -}}

{{/* The role that a component's certificate names. */}}
{{- define "meshrl.role" -}}
{{- index (dict "rollout" "rollout" "trainer" "publisher" "weights" "hub" "orchestrator" "orchestrator" "inference" "agent") . -}}
{{- end -}}

{{/* What a claim asks for: one pod, and only that one, writes it. */}}
{{- define "meshrl.claimSpec" -}}
accessModes: [ReadWriteOnce]
{{- with .root.Values.storage.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ (index .root.Values .component).storage.size }}
{{- end -}}

{{- define "meshrl.trainerScript" -}}
{{- if and (gt (int .Values.trainer.replicas) 1) .Values.config.trainer.ckpt (not .Values.trainer.extraVolumes) -}}
{{- fail "config.trainer.ckpt: each of the trainer's pods would keep its own piece of a checkpoint; mount a folder that they share with trainer.extraVolumes, or set trainer.replicas to 1" -}}
{{- end -}}
# A pod that comes back goes on from the newest checkpoint.
for folder in /outputs/checkpoints/step_*; do
  if [ -d "$folder" ]; then set -- "$@" --ckpt.resume-step -1; break; fi
done
{{- if gt (int .Values.trainer.replicas) 1 }}
exec torchrun --nnodes {{ .Values.trainer.replicas }} --nproc-per-node {{ max 1 (int .Values.trainer.gpu.count) }} --node-rank "$POD_INDEX" --master-addr "$MASTER_ADDR" --master-port 29500 -m meshrl.trainer.main "$@"
{{- else }}
exec trainer "$@"
{{- end }}
{{- end -}}
