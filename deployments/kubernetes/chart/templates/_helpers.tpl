{{- define "tidegate.name" -}}
{{ .Values.nameOverride | default .Release.Name | trunc 42 | trimSuffix "-" }}
{{- end }}

{{- define "tidegate.labels" -}}
app.kubernetes.io/name: tidegate
app.kubernetes.io/instance: {{ include "tidegate.name" . }}
{{- end }}

{{/* The metadata of an object: (dict "root" $ "name" NAME "namespace" NAMESPACE "labels" LABELS), all but root optional. */}}
{{- define "tidegate.metadata" -}}
name: {{ .name | default (include "tidegate.name" .root) }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "tidegate.labels" .root | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "tidegate.secret" -}}
{{ .Values.secret.name | default (printf "%s-secret" (include "tidegate.name" .)) }}
{{- end }}

{{/* A value that may be 0, or what stands for none: (dict "value" VALUE "default" DEFAULT). */}}
{{- define "tidegate.given" -}}
{{ kindIs "invalid" .value | ternary .default .value }}
{{- end }}

{{- define "tidegate.vllm" -}}
{{ include "tidegate.name" .root }}-vllm-{{ .spec.name }}
{{- end }}

{{/* The deployment file as YAML, with the models of vLLM pods, and with the addresses of a KubeRay cluster. */}}
{{- define "tidegate.document" -}}
{{- $text := .Values.deployment -}}
{{- if not (or $text .Values.servingEngineSpec.modelSpec) }}{{ $text = .Files.Get "files/deployment.yaml" }}{{ end -}}
{{- $document := fromYaml (default "{}" $text) -}}
{{- with $document.Error }}{{ fail (printf "deployment: expected YAML: %s" .) }}{{ end -}}
{{- $models := $document.models | default list -}}
{{- range $spec := .Values.servingEngineSpec.modelSpec -}}
{{- $service := dict "service" (include "tidegate.vllm" (dict "root" $ "spec" $spec)) "port" "http" -}}
{{- $name := $spec.servedModelName | default $spec.modelURL -}}
{{- $known := false -}}
{{- range $models }}{{ if eq .name $name }}{{ $known = true }}{{ end }}{{ end -}}
{{- if not $known -}}
{{- $model := dict "name" $name "engine" "external" "discovery" (dict "kubernetes" $service) -}}
{{- $keda := $spec.keda | default dict -}}
{{- $own := $spec.autoscaling | default dict -}}
{{- if or $keda.enabled $own.enabled -}}
{{- $gpus := $spec.requestGPU | default 0 | int -}}
{{- $shape := dict "workload" (printf "deployment/%s" $service.service) -}}
{{- $_ := set $shape (ternary "gpus" "cpus" (gt $gpus 0)) (ternary $gpus ($spec.requestCPU | int) (gt $gpus 0)) -}}
{{- if gt $gpus 1 }}{{ $_ := set $shape "tensor_parallel" $gpus }}{{ end -}}
{{- $bounds := dict "min" ($own.minReplicas | default 0) "max" ($own.maxReplicas | default 1) -}}
{{- if $keda.enabled -}}
{{- $bounds = dict "min" ($keda.minReplicaCount | default 0) "max" ($keda.maxReplicaCount | default 1) -}}
{{- $_ := set $service "scaled_by" "autoscaler" -}}
{{- if not $document.external_scaler }}{{ $_ := set $document "external_scaler" (dict "host" "0.0.0.0") }}{{ end -}}
{{- end -}}
{{- $_ := set $model "shapes" (dict "pod" $shape) -}}
{{- $_ := set $model "modes" (dict "pods" (dict "shape" "pod" "replicas" $bounds)) -}}
{{- $_ := set $model "control" ($spec.control | default (dict "policy" "target_tracking")) -}}
{{- end -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- end -}}
{{- $_ := set $document "models" $models -}}
{{- $deploys := false -}}
{{- $scaled := false -}}
{{- range $models }}{{ if ne (.engine | default "vllm") "external" }}{{ $deploys = true }}{{ end }}{{ range .shapes }}{{ if .workload }}{{ $scaled = true }}{{ end }}{{ end }}{{ end -}}
{{- $ray := .Values.rayClusterSpec.enabled -}}
{{- $count := int .Values.controller.replicas -}}
{{- if or $ray (and $scaled (not $deploys)) -}}
{{- $cluster := $document.cluster | default dict -}}
{{- $given := $cluster.controller | default "" -}}
{{- $port := regexFind "[0-9]+$" ($given | default "7070") -}}
{{- $name := printf "%s-controller" (include "tidegate.name" .) -}}
{{- if or (gt $count 1) (contains "," $given) (hasKey $cluster "leader_election") -}}
{{- if not (hasPrefix "postgresql" ($document.store | default "")) -}}
{{- fail "deployment: store: expected postgresql://HOST/NAME, where several controllers keep their state" -}}
{{- end -}}
{{- if and $ray (not .Values.rayClusterSpec.gcsFaultToleranceOptions) -}}
{{- fail "rayClusterSpec.gcsFaultToleranceOptions: expected a Redis: with several controllers the cluster outlives its head" -}}
{{- end -}}
{{- $names := list -}}
{{- range until (max $count (splitList "," $given | len) | int) }}{{ $names = append $names (printf "%s-%d.%s:%s" $name . $name $port) }}{{ end -}}
{{- $election := $cluster.leader_election | default dict -}}
{{- if not $election.kubernetes }}{{ $_ := set $election "kubernetes" (dict "name" $name) }}{{ end -}}
{{- $_ := set $cluster "leader_election" $election -}}
{{- $_ := set $cluster "controller" (join "," $names) -}}
{{- if $ray }}{{ $_ := set $cluster "address" (printf "%s-ray-head:6379" (include "tidegate.name" .)) }}{{ end -}}
{{- else if $ray -}}
{{- $_ := set $cluster "address" "127.0.0.1:6379" -}}
{{- $_ := set $cluster "controller" (printf "%s:%s" $name $port) -}}
{{- else -}}
{{- $_ := set $cluster "controller" (printf "0.0.0.0:%s" $port) -}}
{{- end -}}
{{- $_ := set $document "cluster" $cluster -}}
{{- else if gt $count 1 -}}
{{- fail "controller.replicas: expected 1: there are no models of a KubeRay cluster, and no vLLM pods that are scaled" -}}
{{- end -}}
{{ toYaml $document }}
{{- end }}

{{/* What the templates need of the deployment file, with its defaults. */}}
{{- define "tidegate.facts" -}}
{{- $document := include "tidegate.document" . | fromYaml -}}
{{- $gateway := $document.gateway | default dict -}}
{{- $budget := $document.budget | default dict -}}
{{- $external := true -}}
{{- $onGpus := false -}}
{{- $scaled := false -}}
{{- $drain := 0 -}}
{{- $namespaces := dict -}}
{{- $labelled := list -}}
{{- range $document.models -}}
{{- if ne (.engine | default "vllm") "external" -}}
{{- $external = false -}}
{{- end -}}
{{- if eq (.engine | default "vllm") "vllm" }}{{ range .shapes }}{{ if .gpus }}{{ $onGpus = true }}{{ end }}{{ end }}{{ end -}}
{{- range .shapes }}{{ if .workload }}{{ $scaled = true }}{{ end }}{{ end -}}
{{- $model := . -}}
{{- with (.discovery | default dict).kubernetes }}{{ if not .api -}}
{{- $namespace := .namespace | default $.Release.Namespace -}}
{{- $kinds := get $namespaces $namespace | default list -}}
{{- range $model.shapes }}{{ with .workload }}{{ $kinds = append $kinds (splitList "/" . | first) }}{{ end }}{{ end -}}
{{- if or $model.shapes (hasKey $model "adapters") }}{{ $labelled = append $labelled $namespace }}{{ end -}}
{{- $_ := set $namespaces $namespace ($kinds | uniq | sortAlpha) -}}
{{- end }}{{ end -}}
{{- end -}}
{{- if not $external -}}
{{- range $document.models -}}
{{- $mode := (.control | default dict).mode | default dict -}}
{{- $drain = max $drain (ternary $mode.drain_timeout_s 120 (hasKey $mode "drain_timeout_s")) -}}
{{- end -}}
{{- end -}}
{{- $port := $gateway.port | default 8080 | int -}}
{{- $admin := $gateway.admin_port | default 8081 | int -}}
{{- $ports := list (dict "name" "http" "containerPort" $port) (dict "name" "admin" "containerPort" $admin) -}}
{{- if hasKey $document "endpoint_picker" -}}
{{- $ports = append $ports (dict "name" "picker" "containerPort" (($document.endpoint_picker | default dict).port | default 9002 | int)) -}}
{{- end -}}
{{- if hasKey $document "external_scaler" -}}
{{- $ports = append $ports (dict "name" "scaler" "containerPort" (($document.external_scaler | default dict).port | default 9003 | int)) -}}
{{- end -}}
{{- $own := add ($gateway.drain_delay_s | default 0 | int) (ternary $gateway.drain_timeout_s 30 (hasKey $gateway "drain_timeout_s") | int) 15 -}}
{{- $cluster := $document.cluster | default dict -}}
{{- $elected := hasKey $cluster "leader_election" -}}
external: {{ $external }}
elected: {{ $elected }}
scaled: {{ and $external $scaled }}
follows: {{ or .Values.rayClusterSpec.enabled (and $external $scaled) }}
scales: {{ or $external .Values.rayClusterSpec.enabled }}
port: {{ $port }}
adminPort: {{ $admin }}
workers: {{ $gateway.workers | default 2 | int }}
{{- /* The most that a worker may hold of requests, and of answers that wait: under overload it refuses what is beyond. */}}
{{- $transfers := max (ternary $gateway.max_upload_bytes 67108864 (hasKey $gateway "max_upload_bytes") | int64) (ternary $gateway.max_body_bytes 16777216 (hasKey $gateway "max_body_bytes") | int64 | mul 2) }}
{{- $queue := ternary $gateway.max_queue_bytes 268435456 (hasKey $gateway "max_queue_bytes") | int64 }}
boundedMib: {{ div (add $queue (mul 2 $transfers) 1048575) 1048576 }}
{{- $secure := $gateway.admin_tls | default dict }}
secure: {{ not (empty $secure) }}
{{- if $secure.client_ca_file }}
{{- /* Probes have no certificate. /docs answers also while the gateway cannot serve. */}}
probed: http
scheme: {{ ternary "HTTPS" "HTTP" (not (empty $gateway.tls)) }}
live: /docs
ready: /health
{{- else }}
probed: admin
scheme: {{ ternary "HTTPS" "HTTP" (not (empty $secure)) }}
live: /livez
ready: /readyz
{{- end }}
cpus: {{ $budget.cpus | default 0 }}
gpus: {{ $budget.gpus | default 0 }}
onGpus: {{ $onGpus }}
{{- $controllerPort := regexFind "[0-9]+$" ($cluster.controller | default "7070") }}
controllerPort: {{ $controllerPort }}
controllers: {{ ternary $cluster.controller (printf "%s-controller:%s" (include "tidegate.name" .) $controllerPort) $elected }}
grace: {{ add $own $drain }}
gatewayGrace: {{ $own }}
ports: {{ toJson $ports }}
namespaces: {{ toJson $namespaces }}
labelled: {{ toJson $labelled }}
{{- end }}

{{/* The image of a "kind": a version has one for pods with GPUs, and one for others. Other tags are taken as they are. */}}
{{- define "tidegate.image" -}}
{{- $tag := .Values.routerSpec.tag | default .Chart.AppVersion | toString -}}
{{ .Values.routerSpec.repository }}:{{ $tag }}{{ if regexMatch "^v?[0-9]+([.][0-9]+)+([a-z]+[0-9]+)?$" $tag }}-{{ .kind }}{{ end }}
{{- end }}

{{/* The environment of each container of Tidegate. */}}
{{- define "tidegate.env" -}}
- {name: TIDEGATE_STATE_DIR, value: /var/lib/tidegate}
- {name: TIDEGATE_SECRET_FILE, value: /etc/tidegate-secret/secret}
- {name: TIDEGATE_GATEWAY_HOST, value: 0.0.0.0}
- {name: TIDEGATE_ADMIN_HOST, value: 0.0.0.0}
- {name: XDG_CACHE_HOME, value: /var/cache/tidegate}
- {name: TRITON_CACHE_DIR, value: /var/cache/tidegate/triton}
{{- with .Values.routerSpec.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of the supervisor and so many gateway workers. */}}
{{- define "tidegate.ownResources" -}}
requests: {cpu: {{ .workers | default 1 | quote }}, memory: {{ printf "%dMi" (add 512 (mul 256 (int .workers))) }}}
limits: {memory: {{ printf "%dMi" (add 512 (mul (add 256 (int .boundedMib)) (int .workers))) }}}
{{- end }}

{{/* The variables of each container on a Ray cluster. */}}
{{- define "tidegate.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: {{ include "tidegate.secret" . }}, key: auth_token}}}
{{- end }}

{{/* Pods that are alike run on several nodes: (dict "labels" LABELS). */}}
{{- define "tidegate.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- toYaml .labels | nindent 8 }}
{{- end }}

{{/* The probes of a container, as the facts say, or (dict "probed" PORT "scheme" SCHEME "live" PATH "ready" PATH). */}}
{{- define "tidegate.probes" -}}
startupProbe:
  httpGet: {path: {{ .live }}, port: {{ .probed }}, scheme: {{ .scheme }}}
  timeoutSeconds: 5
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: {{ .live }}, port: {{ .probed }}, scheme: {{ .scheme }}}
  timeoutSeconds: 5
  periodSeconds: 10
  failureThreshold: 3
readinessProbe:
  httpGet: {path: {{ .ready }}, port: {{ .probed }}, scheme: {{ .scheme }}}
  timeoutSeconds: 5
  periodSeconds: 2
  failureThreshold: 3
{{- end }}

{{- define "tidegate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tidegate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Images of vLLM run as root, and write to their own file system. */}}
{{- define "tidegate.vllmSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Where pods of routerSpec may run. */}}
{{- define "tidegate.placement" -}}
{{- range $key := list "priorityClassName" "runtimeClassName" "nodeSelector" "affinity" "tolerations" "imagePullSecrets" }}
{{- with index $.Values.routerSpec $key }}
{{ $key }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* A claim on a volume, or room in the pod. */}}
{{- define "tidegate.volume" -}}
name: {{ .volume }}
{{- if .size }}
persistentVolumeClaim: {claimName: {{ .claim }}}
{{- else }}
emptyDir: {}
{{- end }}
{{- end }}

{{- define "tidegate.scalerPort" -}}
{{ range (include "tidegate.facts" . | fromYaml).ports }}{{ if eq .name "scaler" }}{{ .containerPort }}{{ end }}{{ end }}
{{- end }}
