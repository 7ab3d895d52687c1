{{/* The labels by which this release's pods of one kind are found. Argument: dict "root" "kind". */}}
{{- define "tidepool.selector" -}}
app.kubernetes.io/name: tidepool
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .kind }}
{{- end }}

{{- define "tidepool.labels" -}}
{{ include "tidepool.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* What all pods have in common. Kubernetes would set TIDEPOOL_PORT for a Service of that name: service links are off. */}}
{{- define "tidepool.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
serviceAccountName: {{ .Values.serviceAccountName }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tidepool.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Spread over zones and machines as far as there are some. Argument: dict "root" "kind". */}}
{{- define "tidepool.spread" -}}
topologySpreadConstraints:
{{- range tuple "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "tidepool.selector" $ | nindent 8 }}
{{- end }}
{{- end }}

{{/* A map of settings as variables, in the order of their names. */}}
{{- define "tidepool.settings" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
{{- end }}
{{- end }}

{{/* The variables of every process of the control plane. */}}
{{- define "tidepool.control.env" -}}
- name: TIDEPOOL_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.secrets.database.name }}, key: {{ .Values.secrets.database.key }}}}
{{- with .Values.secrets.databaseReplica }}
- name: TIDEPOOL_DATABASE_REPLICA_URL
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
- name: TIDEPOOL_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.secrets.redis.name }}, key: {{ .Values.secrets.redis.key }}}}
- name: TIDEPOOL_NODE_KEY
  valueFrom: {secretKeyRef: {name: {{ .Values.secrets.nodeKey.name }}, key: {{ .Values.secrets.nodeKey.key }}}}
- {name: TIDEPOOL_HOME, value: /var/lib/tidepool}
- {name: TIDEPOOL_REGION, value: {{ .Values.region | quote }}}
{{- with .Values.files.url }}
- {name: TIDEPOOL_FILES_URL, value: {{ . | quote }}}
{{- end }}
{{- if .Values.tls.ca }}
- {name: TIDEPOOL_TLS_CA_FILE, value: /etc/tidepool/ca/ca.pem}
{{- end }}
{{- include "tidepool.settings" .Values.settings }}
{{- end }}

{{- define "tidepool.control.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /var/lib/tidepool}
{{- if .Values.files.claim }}
- {name: files, mountPath: /var/lib/tidepool/files}
{{- end }}
{{- if .Values.tls.ca }}
- {name: ca, mountPath: /etc/tidepool/ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "tidepool.control.volumes" -}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
{{- with .Values.files.claim }}
- {name: files, persistentVolumeClaim: {claimName: {{ . }}}}
{{- end }}
{{- with .Values.tls.ca }}
- {name: ca, configMap: {name: {{ . }}}}
{{- end }}
{{- end }}

{{- define "tidepool.control.placement" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}
