{{- define "detour.platform" -}}
{{- $name := .Values.global.platform | default "kubernetes" -}}
{{- $platforms := .Files.Get "platforms.yaml" | fromYaml -}}
{{- if not (hasKey $platforms $name) -}}
{{- fail (printf "global.platform: expected %s, or no value; got %q" (keys $platforms | sortAlpha | join ", ") $name) -}}
{{- end -}}
{{- $platform := get $platforms $name -}}
{{- $chained := ternary $platform.chained .Values.chained (kindIs "invalid" .Values.chained) -}}
{{- dict
  "name" $name
  "binDir" (.Values.cniBinDir | default $platform.cniBinDir)
  "confDir" (.Values.cniConfDir | default $platform.cniConfDir)
  "chained" $chained
  "provider" (.Values.provider | default (ternary "multus" "default" (eq $name "openshift")))
  | toYaml -}}
{{- end -}}

{{- /* The prefix of all object names; for the release "detour": detour. It identifies the release on a node. */ -}}
{{- define "detour.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-detour" .Release.Name) (contains "detour" .Release.Name) -}}
{{- .Values.fullnameOverride | default $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* Refuses an upgrade that would rename the objects: the old agents would remove the plugin from the nodes while the
new ones install it. */ -}}
{{- define "detour.keepsName" -}}
{{- $fullname := include "detour.fullname" . -}}
{{- if .Release.IsUpgrade -}}
{{- range (lookup "apps/v1" "DaemonSet" .Release.Namespace "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $isOwn := eq (dig "metadata" "annotations" "meta.helm.sh/release-name" "" .) $.Release.Name -}}
{{- $name := get $labels "app.kubernetes.io/name" -}}
{{- if and $isOwn (eq (get $labels "app.kubernetes.io/component") "agent") (ne $name $fullname) -}}
{{- fail (printf "release %s: its objects have the prefix %q, expected %q; set fullnameOverride=%s" $.Release.Name $name $fullname $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* These labels never change, because the selector of a DaemonSet is immutable. */ -}}
{{- define "detour.selectorLabels" -}}
app.kubernetes.io/name: {{ include "detour.fullname" . }}
app.kubernetes.io/component: agent
{{- end -}}

{{- define "detour.podLabels" -}}
{{ include "detour.selectorLabels" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: detour
{{- end -}}

{{- define "detour.labels" -}}
{{ include "detour.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "detour.image" -}}
{{- if contains "/" .Values.image }}{{ .Values.image }}{{ else }}{{ .Values.hub }}/{{ .Values.image }}:{{ .Values.tag }}{{ end -}}
{{- end -}}

{{- /* Capabilities of the agent's container: for files that root does not own; for pods' network namespaces; for
users of pods in detour doctor --probe. */ -}}
{{- define "detour.capabilities" -}}
{{- concat (list "CHOWN" "DAC_OVERRIDE" "FOWNER") (ternary (list "NET_ADMIN" "SETGID" "SETUID" "SYS_ADMIN" "SYS_PTRACE") list .Values.repair.enabled) | toYaml -}}
{{- end -}}

{{- define "detour.repair" -}}
{{- $repair := .Values.repair -}}
{{- if not $repair.enabled }}off
{{- else if $repair.repairPods }}repair
{{- else }}{{ include "detour.repairOtherwise" . }}
{{- end -}}
{{- end -}}

{{- define "detour.repairOtherwise" -}}
{{- if and .Values.repair.deletePods .Values.repair.labelPods -}}
{{- fail "repair: expected at most one of deletePods and labelPods, got both" -}}
{{- end -}}
{{- if .Values.repair.deletePods }}delete{{ else if .Values.repair.labelPods }}label{{ else }}off{{ end -}}
{{- end -}}
