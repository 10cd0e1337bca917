// Package meshrl talks to the services of a run: it lists them, watches steps and fetches rollouts. It is written from
// proto/, its vectors and docs/contract.md alone.
package meshrl

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	pb "meshrl.dev/api/meshrl/v1"
)

const (
	// ContractVersion is what the first call of a client carries.
	ContractVersion = "1.1"
	// ErrorDomain is that of ErrorInfo in the details of a status.
	ErrorDomain = "meshrl"

	maxMessageBytes  = 64 << 20
	pingInterval     = 20 * time.Second
	reconnectFor     = 60 * time.Second
	defaultDeadlineS = 60
	summaryS         = 15 // what a group's call lasts beyond the group's own deadline
)

var reconnectAfter = []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, 2 * time.Second}

// token shows the token of the file that MESHRL_TLS_TOKEN names, read for each call. Unset: the call shows none.
type token struct{}

func (token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	path := os.Getenv("MESHRL_TLS_TOKEN")
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return map[string]string{"authorization": "Bearer " + strings.TrimSpace(string(text))}, nil
}

func (token) RequireTransportSecurity() bool { return false }

// codec is that of the generated messages; Debian's gRPC has that of an older protobuf.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(message interface{}) ([]byte, error) {
	return proto.Marshal(message.(proto.Message))
}

func (codec) Unmarshal(data []byte, message interface{}) error {
	return proto.Unmarshal(data, message.(proto.Message))
}

// Dial gives a connection to a service at host:port, without TLS.
func Dial(address string) (*grpc.ClientConn, error) {
	return grpc.Dial(address,
		grpc.WithInsecure(),
		grpc.WithPerRPCCredentials(token{}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingInterval, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(
			grpc.ForceCodec(codec{}), grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes),
		),
	)
}

// ReasonOf is the reason of reasons.proto that a server ended a call with; empty where it gave none.
func ReasonOf(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, is := detail.(*errdetails.ErrorInfo); is && info.Domain == ErrorDomain {
			return info.Reason
		}
	}
	return ""
}

// WatchSteps hands each event of a run to handle, history first, then live. It returns nil once the trainer drains, and
// what handle returns if that is not nil. A stream that breaks is opened again from the last revision seen, for a minute.
func WatchSteps(
	ctx context.Context, trainer pb.TrainerServiceClient, request *pb.WatchStepsRequest,
	handle func(*pb.WatchStepsResponse) error,
) error {
	seen, tries, lost := request.AfterRevision, 0, time.Time{}
	for {
		err := watch(ctx, trainer, &pb.WatchStepsRequest{RunId: request.RunId, AfterRevision: seen},
			func(event *pb.WatchStepsResponse) error {
				seen, tries, lost = event.Revision, 0, time.Time{}
				return handle(event)
			})
		if err == nil || ctx.Err() != nil || !isLost(err) {
			return err
		}
		if lost.IsZero() {
			lost = time.Now()
		} else if time.Since(lost) > reconnectFor {
			return err
		}
		time.Sleep(reconnectAfter[tries])
		if tries+1 < len(reconnectAfter) {
			tries++
		}
	}
}

func watch(
	ctx context.Context, trainer pb.TrainerServiceClient, request *pb.WatchStepsRequest,
	handle func(*pb.WatchStepsResponse) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := trainer.WatchSteps(ctx, request)
	if err != nil {
		return err
	}
	return each(stream.Recv, handle)
}

func isLost(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.Canceled, codes.Aborted, codes.Internal:
		return true
	}
	return false
}

// RunRollouts plays a group and hands each event to handle as it comes: rollouts and failures, then the summary. Ids and
// a deadline of 60 s are filled in where the request leaves them out.
func RunRollouts(
	ctx context.Context, rollout pb.RolloutServiceClient, request *pb.RunRolloutsRequest,
	handle func(*pb.RunRolloutsResponse) error,
) error {
	if request.RequestId == "" {
		request.RequestId = newUUID()
	}
	if request.GroupId == "" {
		request.GroupId = newUUID()
	}
	if request.DeadlineS == 0 {
		request.DeadlineS = defaultDeadlineS
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration((request.DeadlineS+summaryS)*float64(time.Second)))
	defer cancel()
	stream, err := rollout.RunRollouts(ctx, request)
	if err != nil {
		return err
	}
	return each(stream.Recv, handle)
}

func newUUID() string {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		panic(err) // the system has no randomness
	}
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// each hands every message of a stream on, until its end or an error of either side.
func each[E any](receive func() (*E, error), handle func(*E) error) error {
	for {
		message, err := receive()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := handle(message); err != nil {
			return err
		}
	}
}
