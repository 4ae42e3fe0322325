{{- define "detour.platform" -}}
{{- $name := .Values.global.platform | default "kubernetes" -}}
{{- $platforms := .Files.Get "platforms.yaml" | fromYaml -}}
{{- if not (hasKey $platforms $name) -}}
{{- fail (printf "global.platform: %q is not accepted; accepted: %s, or nothing" $name (keys $platforms | sortAlpha | join ", ")) -}}
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

{{- define "detour.labels" -}}
app.kubernetes.io/name: detour
app.kubernetes.io/component: agent
{{- end -}}

{{- define "detour.image" -}}
{{- if contains "/" .Values.image }}{{ .Values.image }}{{ else }}{{ .Values.hub }}/{{ .Values.image }}:{{ .Values.tag }}{{ end -}}
{{- end -}}
