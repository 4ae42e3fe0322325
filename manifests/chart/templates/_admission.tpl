{{- /* The objects that an admission policy checks: pods, and templates for pods. root: the chart; resources: further
resources of the core group; namespaces: those that are excluded besides excludeNamespaces. */ -}}
{{- define "detour.admissionMatches" -}}
{{- $version := .root.Capabilities.KubeVersion.Version -}}
{{- if semverCompare "<1.31-0" $version -}}
{{- fail (printf "admissionPolicy.enabled: expected Kubernetes 1.31 or later, for ValidatingAdmissionPolicy v1 and CEL's functions for IP addresses, got %s; with helm template, add --kube-version" $version) -}}
{{- end -}}
{{- $excluded := concat .namespaces (.root.Values.excludeNamespaces | default list) | uniq -}}
{{- if has "*" $excluded -}}
{{- fail "admissionPolicy.enabled: no effect, because excludeNamespaces contains \"*\"" -}}
{{- end -}}
{{- with $excluded -}}
namespaceSelector:
  matchExpressions:
    - key: kubernetes.io/metadata.name
      operator: NotIn
      values: {{ toJson . }}
{{ end -}}
resourceRules:
  - apiGroups: [""]
    apiVersions: [v1]
    operations: [CREATE, UPDATE]
    resources: {{ concat (list "pods" "podtemplates" "replicationcontrollers") .resources | toJson }}
  - apiGroups: [apps]
    apiVersions: [v1]
    operations: [CREATE, UPDATE]
    resources: [daemonsets, deployments, replicasets, statefulsets]
  - apiGroups: [batch]
    apiVersions: [v1]
    operations: [CREATE, UPDATE]
    resources: [cronjobs, jobs]
{{- end -}}

{{- /* An entry of validations for one annotation: its key, the variable with its items outside the bounds, the key of a
grant, and the sub-plugin's bounds. */ -}}
{{- define "detour.admissionValidation" -}}
{{- $annotation := index . 0 -}}
{{- $denied := printf "variables.%s" (index . 1) -}}
{{- $key := index . 2 -}}
{{- $bounds := index . 3 -}}
{{- $defaults := dict
  "uids" "no \"*\", and at most 65536 IDs in a range"
  "gids" "no \"*\", and at most 65536 IDs in a range"
  "rules" "UIDs (no \"*\", at most 65536 in a range), or ports (at most 1024 in a range, 4096 in total)"
  "containers" "no pattern of \"*\" alone"
  "ports" "at most 1024 ports in a range, and 4096 in total"
  "ip_ranges" "CIDRs with a prefix of at least /8, and four such prefixes in total"
  "resolvers" "all, resolv-conf, excluded-ranges, and CIDRs with a prefix of at least /8, and four such prefixes in total"
-}}
{{- $permitted := list -}}
{{- range $bounds.grants -}}
{{- $grant := . -}}
{{- range $each := ternary (list "uids" "ports") (list $key) (eq $key "rules") -}}
{{- with get $grant.keys $each -}}
{{- $text := printf "%s.%s: %s" $grant.place $each (join ", " . | trunc 200) -}}
{{- if eq $each "containers" -}}
{{- with $grant.keys.kinds }}{{ $text = printf "%s, kinds %s" $text (join ", " .) }}{{ end -}}
{{- end -}}
{{- with $grant.scope }}{{ $text = printf "%s (%s)" $text . }}{{ end -}}
{{- $permitted = append $permitted $text -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $text := join "; " $permitted | trunc 1500 -}}
{{- if not $bounds.place -}}
{{- $text = printf "the default bounds: %s" (get $defaults $key) -}}
{{- else if not $permitted -}}
{{- $text = printf "%s, which permits none" $bounds.place -}}
{{- end -}}
- expression: {{ $denied }}.size() == 0
  message: {{ printf "annotation %s: not permitted" (quote $annotation) | toJson }}
  messageExpression: |-
    'annotation {{ quote $annotation }}'
    + ('{{ $annotation }}' in variables.annotations ? '' : ' of namespace ' + variables.ownNamespace.metadata.name)
    + ': ' + ({{ $denied }}[0].matches('^[ -~]{1,80}$') ? '"' + {{ $denied }}[0] + '"' : 'one item') + ' is not permitted; '
    + {{ printf "expected items within %s; an administrator of the cluster sets these bounds in Helm release %s/%s" $text (index . 4).Namespace (index . 4).Name | toJson }}
{{- end -}}
