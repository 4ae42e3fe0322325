{{- /* The attachments, as JSON: {"files": the entries for the agent, "definitions": NAMESPACE/NAME of each
NetworkAttachmentDefinition}. The default with Multus is istio-cni, which must redirect; the agent writes its file without
an entry unless the plugin is in the cluster network's configuration list. */ -}}
{{- define "detour.attachments" -}}
{{- $platform := include "detour.platform" . | fromYaml -}}
{{- $onlyExcludes := and (not (kindIs "invalid" .Values.config.chain)) (not .Values.primaryPlugin.enabled) -}}
{{- range .Values.config.chain -}}
{{- $onlyExcludes = and $onlyExcludes (has .type (list "uid-exclude" "dns-exclude" "container-exclude" "destination-exclude")) -}}
{{- end -}}
{{- if and $onlyExcludes (eq $platform.provider "multus") (not .Values.attachments) (not .Values.cni.multusChain) -}}
{{- fail "config.chain: all sub-plugins only exclude, so this release would replace default/istio-cni by an attachment that redirects no pod; set attachments (values-excludedns.yaml), or cni.multusChain to run the plugin for every pod" -}}
{{- end -}}
{{- $usesDefault := and (eq $platform.provider "multus") (not $onlyExcludes) -}}
{{- $given := .Values.attachments | default (ternary (list (dict "name" "istio-cni")) list $usesDefault) -}}
{{- $files := list -}}
{{- $byName := dict -}}
{{- $definitions := list -}}
{{- range $attachment := $given -}}
{{- $keys := omit $attachment "namespace" "namespaces" -}}
{{- if not (hasKey $byName $keys.name) -}}
{{- $files = append $files $keys -}}
{{- $_ := set $byName $keys.name (toJson $keys) -}}
{{- else if ne (get $byName $keys.name) (toJson $keys) -}}
{{- fail (printf "attachments: two entries for %q with different keys; expected equal keys, because both have the file %s.conf on the node" $keys.name $keys.name) -}}
{{- end -}}
{{- range $namespace := prepend ($attachment.namespaces | default list) ($attachment.namespace | default "default") -}}
{{- $definitions = append $definitions (printf "%s/%s" $namespace $keys.name) -}}
{{- end -}}
{{- end -}}
{{- if not (or .Values.attachments $platform.chained) -}}
{{- $files = list -}}
{{- end -}}
{{- dict "files" $files "definitions" (uniq $definitions) | toJson -}}
{{- end -}}

{{- /* What to do with the definitions, as JSON: {"rendered": [NAMESPACE/NAME], "foreign": {NAMESPACE/NAME: its owner}}.
A definition that exists and belongs to another owner is foreign: the release uses it, and neither changes nor deletes
it. helm template finds no objects, so all definitions are rendered. */ -}}
{{- define "detour.definitions" -}}
{{- $all := (include "detour.attachments" . | fromJson).definitions -}}
{{- $found := dict -}}
{{- if and (ne .Values.definitions "always") (.Capabilities.APIVersions.Has "k8s.cni.cncf.io/v1/NetworkAttachmentDefinition") -}}
{{- $found = include "detour.foreignDefinitions" (list . $all) | fromJson -}}
{{- end -}}
{{- $rendered := list -}}
{{- $foreign := dict -}}
{{- range $definition := $all -}}
{{- if hasKey $found $definition -}}
{{- $_ := set $foreign $definition (get $found $definition) -}}
{{- else if ne $.Values.definitions "never" -}}
{{- $rendered = append $rendered $definition -}}
{{- end -}}
{{- end -}}
{{- dict "rendered" $rendered "foreign" $foreign | toJson -}}
{{- end -}}

{{- /* The definitions that the release's last revision contains, as JSON. */ -}}
{{- define "detour.ownDefinitions" -}}
{{- $own := "" -}}
{{- if .Release.IsUpgrade -}}
{{- $config := lookup "v1" "ConfigMap" .Release.Namespace (printf "%s-agent" (include "detour.fullname" .)) -}}
{{- $own = dig "metadata" "annotations" "detour.io/definitions" "" $config -}}
{{- end -}}
{{- $own | splitList "," | compact | toJson -}}
{{- end -}}

{{- /* Those of the definitions (second item of the list) that exist and belong to another owner, with that owner, as
JSON. Fails if Helm would delete one: Helm deletes an object that the last revision contains and this one does not, even
if the object has another owner, unless it has the annotation helm.sh/resource-policy=keep. */ -}}
{{- define "detour.foreignDefinitions" -}}
{{- $root := index . 0 -}}
{{- $all := index . 1 -}}
{{- $own := include "detour.ownDefinitions" $root | fromJsonArray -}}
{{- $foreign := dict -}}
{{- if concat $all $own -}}
{{- range $live := (lookup "k8s.cni.cncf.io/v1" "NetworkAttachmentDefinition" "" "").items -}}
{{- $namespace := $live.metadata.namespace -}}
{{- $name := $live.metadata.name -}}
{{- $definition := printf "%s/%s" $namespace $name -}}
{{- $annotations := dig "metadata" "annotations" dict $live -}}
{{- $release := get $annotations "meta.helm.sh/release-name" -}}
{{- $releaseNamespace := get $annotations "meta.helm.sh/release-namespace" -}}
{{- $isOwn := and (eq $release $root.Release.Name) (eq $releaseNamespace $root.Release.Namespace) -}}
{{- if and (has $definition (concat $all $own)) (not $isOwn) -}}
{{- $owner := "not managed by Helm" -}}
{{- if $release -}}
{{- $owner = printf "release %q in namespace %q" $release $releaseNamespace -}}
{{- else if $live.metadata.ownerReferences -}}
{{- $reference := first $live.metadata.ownerReferences -}}
{{- $owner = printf "%s %s" $reference.kind $reference.name | quote -}}
{{- end -}}
{{- if and (has $definition $own) (ne (get $annotations "helm.sh/resource-policy") "keep") -}}
{{- fail (printf "NetworkAttachmentDefinition %s: it belongs to another owner now (%s), and this upgrade would delete it; to leave it to that owner, run \"kubectl annotate net-attach-def -n %s %s helm.sh/resource-policy=keep\" and repeat the upgrade; to take it back, set definitions=always" $definition $owner $namespace $name) -}}
{{- end -}}
{{- $labels := dig "metadata" "labels" dict $live -}}
{{- $isDetour := and $release (eq (get $labels "app.kubernetes.io/part-of") "detour") (eq (get $labels "app.kubernetes.io/instance") $release) -}}
{{- if and $isDetour (has $definition $all) (ne $root.Values.definitions "never") -}}
{{- fail (printf "NetworkAttachmentDefinition %s: it belongs to another release of detour (%s), and both would write %s.conf on a node; use another name in attachments, or, if the releases run on different nodes (nodeSelector), set definitions=never" $definition $owner $name) -}}
{{- end -}}
{{- $_ := set $foreign $definition $owner -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $foreign | toJson -}}
{{- end -}}
